"""Models of this machine's caches."""

import hashlib
from pathlib import Path

import pytest

from pagemill.artifacts import aliases
from pagemill.cli.main import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub's cache with one repository of 1,000 bytes."""
    repository = tmp_path / "hub" / "models--some--model"
    blob = repository / "blobs" / "abc"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (blob.parent, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    blob.write_bytes(b"x" * 2_000_000)
    (snapshot / "model.safetensors").symlink_to(blob)
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of ours with one small model of an alias."""
    monkeypatch.setenv("PAGEMILL_CACHE_ROOT", str(tmp_path / "cache"))
    model = aliases.EmbeddedModel("Small", "small==1", "small/small.gguf", hashlib.sha256(b"small").hexdigest(), 5)
    absent = aliases.EmbeddedModel("Absent", "absent==1", "absent/absent.gguf", "0" * 64, 5)
    monkeypatch.setattr(aliases, "ALIASES", {"small": model, "absent": absent})
    path = tmp_path / "cache" / "models" / "small.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"small")
    return path


def test_list(hub: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--download-dir", str(hub)]) == 0
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["small", "0", "MB", str(cache)],
        ["some/model", "2", "MB", str(hub / "models--some--model")],
        ["absent", "-", "fetched", "on first use"],
    ]


def test_pull(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "small"]) == 0
    assert capsys.readouterr().out == f"small  {cache}\n"
    assert main(["models", "pull", "no-such"]) == 1
    assert "no-such is not an alias" in capsys.readouterr().err


def test_remove(hub: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "remove", "small", "some/model", "--download-dir", str(hub)]) == 0
    assert capsys.readouterr().out == "small  0 MB freed\nsome/model  2 MB freed\n"
    assert not cache.exists()
    assert not list((cache.parent).glob("small*"))
    assert not (hub / "models--some--model").exists()
    assert main(["models", "remove", "small"]) == 1
    assert "small is not in the cache" in capsys.readouterr().err
    assert main(["models"]) == 2
