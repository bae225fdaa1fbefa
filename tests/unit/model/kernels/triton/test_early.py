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


def test_it_is_begun_once(done):
    threads = {early.begin() for _ in range(2)}
    threads.pop().join()
    assert not threads
    assert done == [HASH, UTILS]


def test_a_machine_without_a_driver_is_told_by_who_compiles(done, monkeypatch):
    def missing():
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(UTILS, missing)
    early.begin().join()
    assert done == [HASH]


def test_a_worker_is_begun_without_torch():
    code = "import sys; from pagemill.worker import begin; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
