"""The kernels compile and link for 64-bit Arm, where they run on vectors of the portable width."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pagemill.model.kernels.compile import FLAGS, SOURCES

COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(COMPILER) is None and os.environ.get("CI") != "true",
    reason=f"no {COMPILER} (Debian: apt-get install g++-aarch64-linux-gnu)",
)
def test_every_unit_compiles_and_all_link(tmp_path: Path) -> None:
    objects = [tmp_path / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))]
    running = [
        subprocess.Popen([COMPILER, *FLAGS, "-Werror=all", "-c", str(SOURCES / f"{made.stem}.cpp"), "-o", str(made)])
        for made in objects
    ]
    assert [process.wait() for process in running] == [0] * len(objects)
    library = tmp_path / "kernels.so"
    subprocess.run([COMPILER, "-shared", *map(str, objects), "-fopenmp", "-Wl,-z,defs", "-o", str(library)], check=True)
    header = library.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183, "the number of AArch64"
