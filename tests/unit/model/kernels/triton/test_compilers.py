"""Kernels are compiled by other processes, or by this one where those fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[5]
CASES = Path(__file__).with_name("compilers_cases.py")


@pytest.mark.slow
def test_cases_of_processes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", str(CASES)]
    result = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
