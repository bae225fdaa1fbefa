"""Kernels are compiled together, without a GPU; what the compiler makes of them, a device that only counts takes.

Run by test_together.py in a process without Triton's interpreter, which leaves Triton's language changed.
"""

import errno
import threading

import pytest
import torch
import triton
import triton.language as tl

from pagemill.errors import ConfigError
from pagemill.model.kernels.triton import launch, together
from pagemill.model.kernels.triton.source_length import source_length
from pagemill.model.kernels.triton.together import compile_together
from tests.fakes.triton_device import device

__all__ = ["device"]


def _double(out, x, num, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, 2 * tl.load(x + places, places < num), places < num)


@triton.jit
def _twice(x):
    return 2 * x


def _fill(out, x, num, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), num)


def _quadruple(out, x, num, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, _twice(_twice(tl.load(x + places, places < num))), places < num)


def _octuple(out, x, num, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, _twice(_twice(_twice(tl.load(x + places, places < num)))), places < num)


def _refuse(out, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64)
    tl.store(out, 1)


def half(count):
    return torch.zeros(count, dtype=torch.bfloat16)


def steps(kernel, *blocks, seen=None):
    """One launch each."""
    for block in blocks:
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=block)
        if seen is not None:
            seen.append(block)
        yield


def test_what_is_precompiled_is_compiled_once_and_not_launched(device):
    kernel = triton.jit(_double)

    def precompilation():
        for _ in range(3):
            launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64, num_warps=1)
            yield
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=128, num_warps=1)
        yield

    with compile_together(precompilation()):
        pass
    assert device.loads == ["_double"] * 2
    assert not device.launches
    launch.on(kernel, (7,))(half(64), half(64), 48, BLOCK=64, num_warps=1)
    assert device.loads == ["_double"] * 2
    assert device.launches == [("_double", (7, 1, 1))]


def test_the_body_launches_what_was_precompiled_and_what_was_not(device):
    kernel = triton.jit(_double)
    with compile_together(steps(kernel, 64)):
        for block in (64, 128, 64):
            launch.on(kernel, (block,))(half(64), half(64), 48, BLOCK=block)
    assert device.loads == ["_double"] * 2
    assert device.launches == [("_double", (block, 1, 1)) for block in (64, 128, 64)]


def test_those_that_take_longest_are_compiled_first_and_the_others_as_they_are_asked_for(device, monkeypatch):
    monkeypatch.setattr(together, "current_cpus", lambda: [0])
    monkeypatch.setattr(together, "LONG", source_length(triton.jit(_quadruple)))
    kernels = [triton.jit(each) for each in (_fill, _double, _quadruple, _octuple)]

    def precompilation():
        for kernel in kernels:
            launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64)
        assert not device.loads
        yield

    with compile_together(precompilation()):
        pass
    assert device.loads == ["_octuple", "_quadruple", "_fill", "_double"]


def test_the_length_of_a_source_is_that_of_all_functions_that_it_names_each_once():
    double, quadruple, octuple = (source_length(triton.jit(each)) for each in (_double, _quadruple, _octuple))
    helper = len(_twice.src)
    assert quadruple == len(triton.jit(_quadruple).src) + helper
    assert octuple == len(triton.jit(_octuple).src) + helper > quadruple > double == len(triton.jit(_double).src)
    assert source_length(len) == 0


def test_a_thread_that_cannot_use_the_device_tells_who_launches(device, monkeypatch):
    def refuse(index):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    kernel = triton.jit(_double)
    with compile_together(steps(kernel, 64)), pytest.raises(RuntimeError, match="no such device"):
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64)


def test_an_error_of_the_compiler_is_raised_by_the_launch_as_without(device):
    def launched(kernel):
        with pytest.raises(triton.CompilationError) as caught:
            launch.on(kernel, (1,))(half(1), BLOCK=32)
        return str(caught.value)

    kernel = triton.jit(_refuse)

    def precompilation():
        launch.on(kernel, (1,))(half(1), BLOCK=32)
        launch.on(kernel, (1,))(half(1), BLOCK=128)
        yield

    with compile_together(precompilation()):
        in_body = launched(kernel)
    assert in_body == launched(kernel) == launched(triton.jit(_refuse))
    launch.on(kernel, (1,))(half(1), BLOCK=128)
    assert device.launches == [("_refuse", (1, 1, 1))]


def test_an_error_of_the_precompilation_is_raised_and_kernels_are_launched_again(device):
    kernel = triton.jit(_double)

    def precompilation():
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64)
        raise ValueError("in the precompilation")
        yield

    with pytest.raises(ValueError, match="in the precompilation"), compile_together(precompilation()):
        pass
    launch.on(kernel, (2,))(half(64), half(64), 48, BLOCK=64)
    assert device.launches == [("_double", (2, 1, 1))]
    with compile_together(steps(kernel, 32)):
        pass
    assert len(device.launches) == 1


def test_an_error_of_the_body_waits_for_no_kernel_and_each_is_compiled_when_it_is_launched(device, monkeypatch):
    monkeypatch.setattr(together, "current_cpus", lambda: [0])
    started, ended = threading.Event(), threading.Event()

    def use_device(index):
        started.set()
        ended.wait()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", use_device)
    kernel = triton.jit(_double)
    with pytest.raises(KeyboardInterrupt), compile_together(steps(kernel, 64, 128, 256)):
        started.wait()
        threading.Timer(0.2, ended.set).start()
        raise KeyboardInterrupt
    assert device.loads == ["_double"]
    for block in (256, 64):
        launch.on(kernel, (block,))(half(64), half(64), 48, BLOCK=block)
    assert device.loads == ["_double"] * 2
    assert device.launches == [("_double", (block, 1, 1)) for block in (256, 64)]


@pytest.mark.parametrize(
    ("first", "whole", "precompiled"), [(64, False, [64]), (64, True, [64, 128]), (32, False, [32, 128])]
)
def test_a_precompilation_ends_where_its_first_step_is_on_disk(device, first, whole, precompiled):
    seen = []
    with compile_together(steps(triton.jit(_double), 64)):
        pass
    with compile_together(steps(triton.jit(_double), first, 128, seen=seen), whole):  # another process, for Triton
        pass
    assert seen == precompiled
    assert not device.launches


def test_another_thread_launches_meanwhile(device):
    kernel = triton.jit(_double)

    def launched():
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64)

    launched()

    def precompilation():
        other = threading.Thread(target=launched)
        other.start()
        other.join()
        yield

    with compile_together(precompilation()):
        pass
    assert len(device.launches) == 2


def test_a_launch_of_somebody_else_in_a_precompilation_does_not_wait_for_its_end(device):
    kernel = triton.jit(_double)

    def precompilation():
        kernel[(1,)](half(64), half(64), 48, BLOCK=64)
        yield

    with compile_together(precompilation()):
        pass
    assert device.launches == [("_double", (1, 1, 1))]


def test_a_disk_that_is_full_is_one_clear_error(device, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("triton.runtime.cache.FileCacheManager.put", full)
    kernel = triton.jit(_double)
    message = "compiled kernels cannot be kept in .*: No space left on device; make room there, or set TRITON_CACHE_DIR"
    with pytest.raises(ConfigError, match=message), compile_together(steps(kernel, 64)):
        launch.on(kernel, (1,))(half(64), half(64), 48, BLOCK=64)
