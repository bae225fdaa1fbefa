"""What is asked of the CUDA driver, by a library that only notes it; that copies arrive is tested on a GPU."""

import types

import pytest
import torch

from pagemill.errors import PagemillError
from pagemill.platforms import cuda_copier
from pagemill.platforms.cuda import CudaPlatform
from pagemill.platforms.cuda_copier import CudaCopier


class Library:
    """Has every function; each returns the status that the test has set for it."""

    def __init__(self, calls, status):
        self._calls = calls
        self._status = status

    def __getattr__(self, name):
        def function(*arguments):
            self._calls.append((name, *arguments))
            return self._status.get(name, 0)

        setattr(self, name, function)
        return function


@pytest.fixture
def status():
    return {}


@pytest.fixture
def calls(monkeypatch, status):
    """Of the driver and of torch."""
    calls = []
    monkeypatch.setattr(cuda_copier.ctypes, "PyDLL", lambda _: Library(calls, status))
    monkeypatch.setattr(cuda_copier.ctypes, "CDLL", lambda _: Library(calls, status))
    for name, value in (
        ("init", None),
        ("current_device", 3),
        ("current_stream", types.SimpleNamespace(cuda_stream=7)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: calls.append(("set_stream", stream.cuda_stream)))
    cuda_copier._driver.cache_clear()
    yield calls
    cuda_copier._driver.cache_clear()


def names(calls):
    return [name for name, *_ in calls]


def test_a_thread_enters_the_device_and_the_stream_of_whoever_made_it(calls):
    copier = CudaCopier()
    assert calls[0][0] == "cuDevicePrimaryCtxRetain"
    assert calls[0][2] == 3
    calls.clear()
    copier.enter()
    assert names(calls) == ["cuCtxSetCurrent", "set_device", "set_stream"]
    assert calls[1:] == [("set_device", 3), ("set_stream", 7)]


def test_the_main_stream_stands_for_none(calls):
    copier = CudaCopier()
    calls.clear()
    copier.record(11)
    copier.record(11, 5)
    copier.hold(11)
    copier.hold(11, 5)
    copier.copy(1 << 40, 2 << 40, 1 << 33, 5)
    assert calls == [
        ("cuEventRecord", 11, 7),
        ("cuEventRecord", 11, 5),
        ("cuStreamWaitEvent", 7, 11, 0),
        ("cuStreamWaitEvent", 5, 11, 0),
        ("cuMemcpyHtoDAsync_v2", 1 << 40, 2 << 40, 1 << 33, 5),
    ]


def test_only_an_event_that_has_not_happened_is_waited_for(calls, status):
    copier = CudaCopier()
    calls.clear()
    copier.finish(11)
    assert names(calls) == ["cuEventQuery"]
    status["cuEventQuery"] = cuda_copier._NOT_READY
    copier.finish(11)
    assert names(calls)[1:] == ["cuEventQuery", "cuEventSynchronize"]


def test_memory_that_cannot_be_pinned_is_no_error_and_anything_else_is(calls, status):
    copier = CudaCopier()
    assert copier.pin(4096, 4096)
    status.update(cuMemHostRegister_v2=2, cuEventRecord=700)
    assert not copier.pin(4096, 4096)
    with pytest.raises(PagemillError, match="driver failed in cuEventRecord with 700: unknown error"):
        copier.record(11)


def test_without_the_library_there_is_no_copier(calls, monkeypatch):
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_copier.ctypes, "PyDLL", missing)
    assert CudaPlatform().copier() is None
