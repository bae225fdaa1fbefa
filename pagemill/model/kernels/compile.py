"""From the C++ sources of the CPU kernels to one library, by a compiler for this machine or for another kind.

Knows neither where libraries are kept nor how they are loaded. One library holds every instruction set of its kind of
machine and chooses when it is loaded.
"""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
_SAME_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}
COMPILE_LIMIT_S = 300
"""By default: somebody waits for a server to start."""


def machine() -> str:
    """The kind of this machine's processor: x86_64, aarch64, or what the system calls it."""
    name = platform.machine()
    return _SAME_MACHINES.get(name, name)


def sources_hash(kind: str) -> str:
    """Of all that a library for that kind of machine depends on, but the compiler and the OpenMP runtime."""
    digest = hashlib.sha256(repr((FLAGS, _X86_FLAGS, kind)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def compile_library(
    compiler: str, target: Path, kind: str, runtime: Sequence[str], limit_s: float = COMPILE_LIMIT_S
) -> None:
    """All units side by side, then the library; it appears in its place complete. `runtime`: what is linked as the
    OpenMP runtime; nothing leaves its functions to be found in the process that loads the library. Raises
    SubprocessError, also where a unit takes longer than `limit_s`, and OSError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        running = [
            subprocess.Popen(
                [compiler, *FLAGS, *_isa_flags(source, kind), "-c", str(source), "-o", str(made)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, made in objects.items()
        ]
        try:
            for process in running:
                _finish(process, limit_s)
        finally:
            for process in running:  # when one has failed, nobody needs the others
                if process.poll() is None:
                    process.kill()
                if process.stderr is not None and not process.stderr.closed:
                    process.communicate()
        make_library([compiler, "-shared", *map(str, objects.values()), *runtime], target, limit_s)


def make_library(command: Sequence[str], target: Path, limit_s: float) -> None:
    """Run a compiler, which is told where to write; the library appears in its place complete. Raises SubprocessError,
    also where it takes longer than `limit_s`, and OSError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "library.so"
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=limit_s)
        made.chmod(0o755)
        os.replace(made, target)  # noqa: PTH105 - atomic: another process may be loading


def _finish(process: "subprocess.Popen[str]", limit_s: float) -> None:
    try:
        _, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args, stderr=errors)


def _isa_flags(source: Path, kind: str) -> tuple[str, ...]:
    return _X86_FLAGS.get(source.name, ()) if kind == "x86_64" else ()
