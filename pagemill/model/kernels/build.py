"""Compile the C++ kernels, once; `python -m pagemill.model.kernels.build` does it ahead.

Knows nothing about what the kernels do. One library holds every instruction set and chooses when it is loaded, so a
cache may be shared between machines; it lies under a hash of all it depends on.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import __file__ as _torch_file

from pagemill import envs
from pagemill.log import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fopenmp"),
    # Contraction off: the same formula gives the same bits wherever it is inlined. See `fma` in vec.h.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
_X86_FLAGS = {
    "isa_avx2.cpp": ("-mavx2", "-mfma"),
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_vnni.cpp": (*_AVX512, "-mavx512vnni"),
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
}
COMPILE_LIMIT_S = 300


def build() -> Path | None:
    """The library's path, compiled first when it is not there; None, with one line in the log, when it cannot be."""
    folder = envs.cache_home() / "kernels" / _sources_hash()
    compiler = shutil.which(envs.compiler())
    if compiler is None:
        # Made ahead, where there was a compiler.
        found = next(iter(sorted(folder.glob("*.so"))), None)
        if found is None:
            logger.warning("no C++ compiler (%s): kernels run in plain torch, which is slower", envs.compiler())
            return None
        return _own(found)
    target = folder / f"{_compiler_hash(compiler)}.so"
    if target.exists():
        return _own(target)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        with _locked(folder / "lock"):
            if not target.exists():
                logger.info("compiling the CPU kernels, once for this machine")
                _compile(compiler, target)
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("the CPU kernels do not compile, plain torch runs instead: %s", _first_problem(error))
        return None
    return _own(target)


def _own(library: Path) -> Path | None:
    """The library, unless others than this user and root could have put it there: whoever loads it runs it."""
    for path in (library, library.parent):
        facts = path.stat()
        others = 0o002 if facts.st_gid == os.getgid() else 0o022
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & others:
            logger.warning(
                "%s is not loaded, and kernels run in plain torch, which is slower: it is of user %d with mode %o, so "
                "that others may have changed it; remove it, or set PAGEMILL_CACHE_ROOT to a folder of your own",
                path, facts.st_uid, facts.st_mode & 0o7777,
            )  # fmt: skip
            return None
    return library


def _first_problem(error: Exception) -> str:
    """One line of what a compiler, or the system, said: the first that names an error."""
    lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or [""]
    return next((line for line in lines if "error" in line.lower()), lines[0])


def _compile(compiler: str, target: Path) -> None:
    """All units side by side, then the library; it appears in its place complete. Raises SubprocessError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        running = [
            subprocess.Popen(
                [compiler, *FLAGS, *_isa_flags(source), "-c", str(source), "-o", str(made)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, made in objects.items()
        ]
        try:
            for process in running:
                _finish(process)
        finally:
            for process in running:  # when one has failed, nobody needs the others
                if process.poll() is None:
                    process.kill()
                if process.stderr is not None and not process.stderr.closed:
                    process.communicate()
        library = Path(scratch) / "kernels.so"
        link = [compiler, "-shared", *map(str, objects.values()), *_openmp(), "-o", str(library)]
        subprocess.run(link, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        library.chmod(0o755)
        os.replace(library, target)  # noqa: PTH105 - atomic: another process may be loading


def _finish(process: "subprocess.Popen[str]") -> None:
    try:
        _, errors = process.communicate(timeout=COMPILE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)


def _isa_flags(source: Path) -> tuple[str, ...]:
    return _X86_FLAGS.get(source.name, ()) if platform.machine() in ("x86_64", "AMD64") else ()


def _openmp() -> tuple[str, ...]:
    """torch's own OpenMP runtime where it ships one: a second one in the process would mean twice the threads."""
    torch_folder = Path(_torch_file).parent
    for folder in (torch_folder / "lib", torch_folder.with_name("torch.libs")):
        for runtime in sorted(folder.glob("libgomp*.so*")):
            return (str(runtime),)
    return ("-fopenmp",)


def _sources_hash() -> str:
    digest = hashlib.sha256(repr((FLAGS, _X86_FLAGS, platform.machine())).encode())
    digest.update(repr([Path(name).name for name in _openmp()]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


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
    print(build() or "not built")
