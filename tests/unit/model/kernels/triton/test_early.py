"""What is begun before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.model.kernels.triton import early

ROOT = Path(__file__).resolve().parents[5]
HASH = "triton.runtime.cache.triton_key"
UTILS = "triton.backends.nvidia.driver.CudaUtils"


@pytest.fixture
def done(monkeypatch):
    """What was called."""
    called = []
    monkeypatch.setattr(HASH, lambda: called.append(HASH))
    monkeypatch.setattr(UTILS, lambda: called.append(UTILS))
    early.begin.cache_clear()
    yield called
    early.begin.cache_clear()


def test_it_is_begun_once_and_leaves_the_driver_to_triton(done):
    threads = {early.begin() for _ in range(2)}
    threads.pop().join()
    assert not threads
    assert done == [HASH]


def test_what_fails_is_told_by_who_compiles(done, monkeypatch):
    def broken():
        raise OSError("no compiler")

    monkeypatch.setattr(HASH, broken)
    early.begin().join()
    assert not done


def test_a_worker_is_begun_without_torch():
    code = "import sys; from pagemill.worker import begin; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
