"""What is taken from the CUDA driver, with a library in its place; that copies arrive is tested on a GPU."""

import types

import pytest
import torch

from pagemill.platforms import cuda_copier
from pagemill.platforms.cuda import CudaPlatform
from pagemill.platforms.cuda_copier import CudaCopier

CONTEXT = 0x7000_0000_0001


class Driver:
    """Every function has an address of its own; two are called."""

    def __init__(self):
        self.calls = []
        self.status = 0
        self._made = {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._made.setdefault(name, lambda *_: 0)

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = CONTEXT
        self.calls.append(("retain", device.value))
        return self.status

    def cuCtxSetCurrent(self, context):
        self.calls.append(("set", getattr(context, "value", None)))
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    # The functions whose addresses are taken are not those that the test sees being called.
    monkeypatch.setattr(cuda_copier, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_copier, "_address", lambda function: id(function))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    return driver


def test_the_context_of_the_current_device_and_the_current_stream(driver):
    copier = CudaCopier()
    assert driver.calls == [("retain", 3), ("set", CONTEXT)]
    assert (copier.calls.context, copier.calls.main_stream) == (CONTEXT, 7)
    assert copier.calls.copy == id(driver.cuMemcpyHtoDAsync_v2)
    assert copier.calls.hold == id(driver.cuStreamWaitEvent)


def test_without_a_context_or_the_library_there_is_no_copier(driver, monkeypatch):
    driver.status = 100
    with pytest.raises(OSError, match="the CUDA driver says 100"):
        CudaCopier()
    assert CudaPlatform().copier() is None

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_copier, "_driver", missing)
    assert CudaPlatform().copier() is None
