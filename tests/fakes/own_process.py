"""`run_cases`: tests in a process of their own, where Triton compiles instead of interpreting."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_cases(cases: Path, timeout_s: float) -> None:
    """Fails, with the end of what they printed, where one of the file's tests does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", str(cases)]
    result = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
