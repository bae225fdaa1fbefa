"""Containers, by the files that they leave."""

from pathlib import Path

import pytest

from pagemill.utils.containers import container


@pytest.mark.parametrize(("file", "text", "name"), [
    (".dockerenv", "", "docker"),
    ("run/.containerenv", "", "podman"),
    ("var/run/secrets/kubernetes.io/serviceaccount", "", "kubernetes"),
    ("proc/1/cgroup", "12:cpu:/kubepods/besteffort/pod1\n", "kubepods"),
    ("proc/1/cgroup", "0::/\n", None),
    ("etc/hosts", "docker", None),
])  # fmt: skip
def test_what_shows_a_container(tmp_path: Path, file: str, text: str, name: str | None) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert container(tmp_path) == name
