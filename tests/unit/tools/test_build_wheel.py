import subprocess
import zipfile

import pytest

from pagemill.model.kernels.build import prebuilt_name
from tools import build_wheel

COMPILES_NOTHING = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf compiled > "$2"
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["x86_64", "aarch64"])
def test_a_wheel_has_the_kernels_of_its_kind_of_machine(tmp_path, monkeypatch, kind):
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILES_NOTHING)
    compiler.chmod(0o755)
    monkeypatch.setattr(build_wheel, "needed_glibc", lambda library: 28)
    wheel = build_wheel.build_wheel(kind, str(compiler), tmp_path / "dist")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{kind}.whl")
    with zipfile.ZipFile(wheel) as archive:
        prebuilt = [name for name in archive.namelist() if name.endswith(".so")]
        assert prebuilt == [f"pagemill/model/kernels/prebuilt/{prebuilt_name(kind)}"]
        assert archive.read(prebuilt[0]) == b"compiled"
        names = set(archive.namelist())
    assert {"pagemill/model/kernels/cpu/kernels.h", "pagemill/serve/http/static/index.html"} <= names


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0x0010: Name: GLIBC_2.2.5 Flags: none\n0x0020: Name: GLIBC_2.34  Flags: none", 34),
        ("0x0010: Name: GLIBC_2.14  Flags: none\n0x0020: Name: GLIBCXX_3.4.29", 17),
    ],
)
def test_the_oldest_c_library_that_will_do(tmp_path, monkeypatch, said, expected):
    def readelf(command, **options):
        assert command[0] == "readelf"
        return subprocess.CompletedProcess(command, 0, stdout=said)

    monkeypatch.setattr(subprocess, "run", readelf)
    assert build_wheel.needed_glibc(tmp_path / "k.so") == expected


def test_without_any_compiler_nothing_is_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build_wheel, "compiler_for", lambda kind: None)
    assert build_wheel.main(["--into", str(tmp_path)]) == 1
    assert "no wheel for x86_64" in capsys.readouterr().err
