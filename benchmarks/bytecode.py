"""Bytecode of everything that a Python imports, as an installation leaves it.

Images for GPU machines often have none, and say that none is to be written: then every start compiles a thousand files
of torch from their source, which takes twice as long as all the rest of `import torch`.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

WRITES_NONE = "PYTHONDONTWRITEBYTECODE"
FOLDER = "PYTHONPYCACHEPREFIX"


def compiled(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Variables for processes that are to find bytecode; none where torch has its own already. Otherwise that of every
    package on the path is compiled into `folder`, as far as it is not there, on all cores."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.cached is not None and Path(spec.cached).exists():
        return {}
    variables = {FOLDER: str(folder), WRITES_NONE: ""}
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", "0", *_folders(environment)],
        env=environment | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # some packages keep files that are no Python of today
    )
    return variables


def _folders(environment: dict[str, str]) -> list[str]:
    """Where packages are, for a process with this environment."""
    asked = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in asked.stdout.splitlines() if path and Path(path).is_dir()]
