"""Compile the C++ kernels for this machine, once; `python -m pagemill.model.kernels.build` does it ahead.

Knows nothing about what the kernels do. The library is kept in the cache under a hash of everything it depends on.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from pagemill import envs
from pagemill.log import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)
COMPILE_LIMIT_S = 300


def library_path() -> Path:
    """Where this machine's library is, or will be."""
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine(), _cpu_flags())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return envs.cache_home() / "kernels" / f"{digest.hexdigest()[:20]}.so"


def build() -> Path | None:
    """The library's path, compiled first when it is not there; None, with one line in the log, when it cannot be."""
    target = library_path()
    if target.exists():
        return target
    compiler = shutil.which(envs.compiler())
    if compiler is None:
        logger.warning("no C++ compiler (%s): kernels run in plain torch, which is slower", envs.compiler())
        return None
    logger.info("compiling the CPU kernels, once for this machine")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        scratch = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(scratch)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        except (subprocess.SubprocessError, OSError) as error:
            detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            logger.warning("the CPU kernels do not compile, plain torch runs instead: %s", detail[0] if detail else "")
            return None
        os.replace(scratch, target)  # noqa: PTH105 - atomic: another process may do the same
    return target


def _cpu_flags() -> str:
    """What -march=native depends on: a cache may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


if __name__ == "__main__":
    print(build() or "not built")
