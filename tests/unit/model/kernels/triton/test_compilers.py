"""Kernels are compiled by other processes, or by this one where those fail."""

from pathlib import Path

import pytest

from tests.fakes.own_process import run_cases

pytest.importorskip("triton")


@pytest.mark.slow
def test_cases_of_processes():
    run_cases(Path(__file__).with_name("compilers_cases.py"), timeout_s=400)
