"""A context that is made while torch is imported, with a library in the driver's place."""

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.platforms import cuda, cuda_context
from pagemill.platforms.cuda import CudaPlatform
from pagemill.platforms.cuda_context import EarlyContext

DEVICE = 5


class Driver:
    """Notes what it is asked for. Devices are numbered from DEVICE on."""

    def __init__(self):
        self.calls = []
        self.status = 0

    def cuInit(self, flags):
        self.calls.append(("init", flags))
        return self.status

    def cuDeviceGet(self, device, number):
        self.calls.append(("get", number))
        device._obj.value = DEVICE + number
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append(("retain", device.value))
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_context.ctypes, "CDLL", {cuda_context.LIBRARY: driver}.__getitem__)
    return driver


@pytest.fixture
def management(monkeypatch, driver):
    class Management:
        """What others use grows with each call of the driver: our context is part of it."""

        def device(self, index):
            return type("Device", (), {"used_bytes": 100 + len(driver.calls)})

    monkeypatch.setattr(cuda, "_Management", Management)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: driver.calls.append(("set", device)))


def test_the_primary_context_of_the_device(driver):
    EarlyContext(1).wait()
    assert driver.calls == [("init", 0), ("get", 1), ("retain", DEVICE + 1)]


def test_a_driver_that_refuses_is_asked_for_no_more(driver):
    driver.status = 100
    EarlyContext(0).wait()
    assert driver.calls == [("init", 0)]


def test_without_the_library_nothing_is_made(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_context.ctypes, "CDLL", missing)
    EarlyContext(0).wait()


def test_what_others_use_is_read_before(driver, management):
    platform = CudaPlatform()
    platform.prepare(1)
    platform.start(1)
    assert driver.calls == [("init", 0), ("get", 1), ("retain", DEVICE + 1), ("set", 1)]
    assert platform.memory().others() == 100


def test_a_process_that_has_a_context_gets_no_other(driver, management, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    platform = CudaPlatform()
    platform.prepare(0)
    platform.start(0)
    assert driver.calls == [("set", 0)]
    assert platform.memory().others() == 0


def test_a_device_that_is_not_there_is_told_by_the_start(driver, management):
    platform = CudaPlatform()
    platform.prepare(2)
    with pytest.raises(ConfigError, match="worker 2 of this machine needs a GPU of its own, and there are 2"):
        platform.start(2)


def test_without_the_management_library_only_the_start_fails(driver, management, monkeypatch):
    def missing():
        raise OSError("libnvidia-ml.so.1")

    monkeypatch.setattr(cuda, "_Management", missing)
    platform = CudaPlatform()
    platform.prepare(0)
    assert driver.calls == []
    with pytest.raises(OSError, match="libnvidia-ml"):
        platform.start(0)
