"""Find the library of C++ kernels: `prebuilt` in a wheel, or made by `build`, once for a machine; `python -m
pagemill.model.kernels.build` does it ahead.

Knows nothing about what the kernels do. A cache may be shared between machines: libraries lie under a hash of all they
depend on.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import __file__ as _torch_file

from pagemill import envs
from pagemill.log import get_logger
from pagemill.model.kernels.compile import COMPILE_LIMIT_S, compile_library, machine, sources_hash

logger = get_logger(__name__)

PREBUILT = Path(__file__).parent / "prebuilt"
"""In a wheel, a library for its kind of machine (tools/build_wheel.py)."""
_SLOWER = "plain torch runs instead, which is several times slower"


def prebuilt_name(kind: str) -> str:
    """The file in `PREBUILT` of the library that these sources make for a kind of machine."""
    return f"{kind}-{sources_hash(kind)}.so"


def prebuilt() -> Path | None:
    """The library that came with the package, if it is of these sources and for this kind of machine. It is as
    trustworthy as the modules beside it."""
    found = PREBUILT / prebuilt_name(machine())
    return found if found.exists() else None


def build() -> Path | None:
    """The path of a library for this machine, compiled first when it is not there; None, with one line in the log, when
    it cannot be."""
    folder = envs.cache_home() / "kernels" / _cache_hash()
    compiler = shutil.which(envs.compiler())
    if compiler is None:
        # Made ahead, where there was a compiler.
        found = next(iter(sorted(folder.glob("*.so"))), None)
        if found is None:
            logger.warning(
                "the CPU kernels are not compiled and there is no C++ compiler (%s): %s; install g++, set CXX, or "
                "install a wheel of pagemill, which has them compiled",
                envs.compiler(), _SLOWER,
            )  # fmt: skip
            return None
        return _own(found)

    def compile_to(target: Path) -> None:
        logger.info("compiling the CPU kernels, once for this machine")
        compile_library(compiler, target, machine(), _openmp())

    try:
        return compiled_once(folder, compiler, compile_to)
    except subprocess.TimeoutExpired:
        logger.warning(
            "the CPU kernels were not compiled within %d s, on a machine that is busy or slow: %s; run `python -m "
            "pagemill.model.kernels.build` when it is idle, or install a wheel of pagemill, which has them compiled",
            COMPILE_LIMIT_S, _SLOWER,
        )  # fmt: skip
        return None
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("the CPU kernels do not compile, %s: %s", _SLOWER, first_problem(error))
        return None


def compiled_once(folder: Path, compiler: str, compile_to: Callable[[Path], None]) -> Path | None:
    """The library that a compiler makes, in a folder of the cache, made first when it is not there; None, with one line
    in the log, where others may have put it there. Raises SubprocessError and OSError."""
    target = folder / f"{_compiler_hash(compiler)}.so"
    if not target.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        with _locked(folder / "lock"):
            if not target.exists():
                compile_to(target)
    return _own(target)


def _own(library: Path) -> Path | None:
    """The library, unless others than this user and root could have put it there: whoever loads it runs it."""
    for path in (library, library.parent):
        facts = path.stat()
        others = 0o002 if facts.st_gid == os.getgid() else 0o022
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & others:
            logger.warning(
                "%s is not loaded, and plain torch does its work, which is slower: it is of user %d with mode %o, so "
                "that others may have changed it; remove it, or set PAGEMILL_CACHE_ROOT to a folder of your own",
                path, facts.st_uid, facts.st_mode & 0o7777,
            )  # fmt: skip
            return None
    return library


def first_problem(error: Exception) -> str:
    """One line of what a compiler, or the system, said: the first that names an error."""
    lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or [""]
    return next((line for line in lines if "error" in line.lower()), lines[0])


def _openmp() -> tuple[str, ...]:
    """torch's own OpenMP runtime where it ships one: a second one in the process would mean twice the threads."""
    torch_folder = Path(_torch_file).parent
    for folder in (torch_folder / "lib", torch_folder.with_name("torch.libs")):
        for runtime in sorted(folder.glob("libgomp*.so*")):
            return (str(runtime),)
    return ("-fopenmp",)


def _cache_hash() -> str:
    runtimes = [Path(name).name for name in _openmp()]
    return hashlib.sha256(repr((sources_hash(machine()), runtimes)).encode()).hexdigest()[:20]


def _compiler_hash(compiler: str) -> str:
    """By path, size and date: asking the compiler for its version would cost every start a process."""
    facts = Path(compiler).resolve().stat()
    return hashlib.sha256(repr((compiler, facts.st_size, facts.st_mtime_ns)).encode()).hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Several workers start at once; one compiles, the others wait for it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(prebuilt() or build() or "not built")
