"""Builds wheels with the C++ kernels compiled, one for each kind of machine that a compiler is found for, into dist/.

Where such a wheel is installed no compiler is needed. Each is named after the oldest C library that its kernels run
with. `pip install` of the sources goes on without them: they are compiled on first use. Knows nothing about what the
kernels do.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is run as a script too

from pagemill.model.kernels.build import prebuilt_name  # noqa: E402 - found by the line above
from pagemill.model.kernels.compile import compile_library, machine  # noqa: E402 - as above

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
CROSS_COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
COMPILE_LIMIT_S = 1800
"""Nobody waits for a server meanwhile, and whoever builds wheels may be doing other things with the machine."""
OLDEST_GLIBC = 17
"""Of 2.17, from which on tags are spelled so."""


def main(arguments: list[str]) -> int:
    """Print the path of each wheel. Exit status: 0, 1 when none can be built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--only", choices=sorted(CROSS_COMPILERS), help="build for this kind of machine (default: all)")
    asked = parser.parse_args(arguments)
    wanted = [asked.only] if asked.only else sorted(CROSS_COMPILERS)
    found = {kind: compiler for kind in wanted if (compiler := compiler_for(kind)) is not None}
    for kind in wanted:
        if kind not in found:
            print(f"no wheel for {kind}: no {CROSS_COMPILERS[kind]}", file=sys.stderr)
    for kind, compiler in found.items():
        print(build_wheel(kind, compiler, asked.into))
    return 0 if found else 1


def compiler_for(kind: str) -> str | None:
    """The path of a compiler for a kind of machine; None where there is none."""
    return shutil.which("g++" if kind == machine() else CROSS_COMPILERS[kind])


def build_wheel(kind: str, compiler: str, folder: Path) -> Path:
    """The wheel for a kind of machine, in `folder`. Raises SubprocessError for what does not compile or build."""
    with tempfile.TemporaryDirectory(prefix="pagemill-wheel-") as scratch:
        source = Path(scratch) / "source"
        copy_sources(source)
        library = source / "pagemill/model/kernels/prebuilt" / prebuilt_name(kind)
        library.parent.mkdir()
        # The functions of OpenMP are torch's, which every process has loaded before: nothing is linked for them.
        compile_library(compiler, library, kind, (), COMPILE_LIMIT_S)
        made = Path(scratch) / "wheel"
        options = f"--build-option=--plat-name=manylinux_2_{needed_glibc(library)}_{kind}"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"),
                *("--no-build-isolation", f"--config-settings={options}", "--wheel-dir", str(made), str(source)),
            ],
            check=True,
        )
        (wheel,) = made.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, folder))


def copy_sources(folder: Path) -> None:
    """What a wheel is made of, without what lies in this checkout besides."""
    folder.mkdir()
    for name in SOURCES:
        shutil.copy2(ROOT / name, folder)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "pagemill", folder / "pagemill", ignore=unwanted)


def needed_glibc(library: Path) -> int:
    """The N of glibc 2.N, the oldest that has all functions that a library asks for."""
    said = subprocess.run(
        ["readelf", "--version-info", "--wide", str(library)], check=True, capture_output=True, text=True
    )
    return max([OLDEST_GLIBC, *(int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", said.stdout))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
