"""Kernels are compiled by other processes, without a GPU. Run by test_compilers.py in a process without Triton's
interpreter, which leaves Triton's language changed."""

import errno
import importlib
import os
import shutil
import signal
import subprocess
import threading
from contextlib import closing
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from pagemill.errors import ConfigError
from pagemill.model.kernels.triton import batching, compiler_process, compilers, gated_prompts
from pagemill.model.kernels.triton.together import compile_together
from pagemill.utils.processes import Child
from tests.fakes.triton_device import Device
from tests.fakes.triton_device import device as fake

__all__ = ["fake"]
HERE = "tests.unit.model.kernels.triton.compilers_cases"


def gather():
    """A small kernel."""
    cache = torch.zeros(50, 128, dtype=torch.bfloat16)
    batching.gather_pair(cache, cache, torch.zeros(4, dtype=torch.int64))


def multiply():
    """One of Gluon's, with descriptors of tensors."""
    gated_prompts.gated_many(
        torch.zeros(600, 512, dtype=torch.bfloat16), torch.zeros(512, 512, dtype=torch.bfloat16), True
    )


def steps(*works):
    for work in works:
        work()
        yield


def forget():
    """As in another process: what was compiled is on disk only."""
    for kernel in (batching._gather_pair, gated_prompts._gated_many):
        kernel.device_caches.clear()


@pytest.fixture(autouse=True)
def forgotten():
    forget()


@pytest.fixture
def asked(monkeypatch):
    """Orders that were given."""
    given = []
    compile_there = compilers.Compiler.compile

    def compile_and_note(self, order):
        given.append(order)
        return compile_there(self, order)

    monkeypatch.setattr(compilers.Compiler, "compile", compile_and_note)
    return given


def refuse(*_, **__):
    raise AssertionError("compiled by this process")


def only_elsewhere(monkeypatch):
    for source in (ASTSource, GluonASTSource):
        monkeypatch.setattr(source, "make_ir", refuse)


def binaries(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.cubin"))}


def test_kernels_are_compiled_by_other_processes_to_the_same_bits(fake, monkeypatch, tmp_path):
    works = (gather, multiply)
    here, there = tmp_path / "here", tmp_path / "there"
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(there))
        only_elsewhere(patch)
        with compile_together(steps(*works)):
            pass
    assert sorted(fake.loads) == ["_gated_many", "_gather_pair"]
    assert not [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    forget()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    monkeypatch.setattr("pagemill.model.kernels.triton.together.order_of", lambda *_: None)
    with compile_together(steps(*works)):
        pass
    assert binaries(here) == binaries(there)
    assert len(binaries(here)) == len(works)


def test_what_is_on_disk_starts_no_process(fake, monkeypatch):
    for _ in range(2):
        with compile_together(steps(gather)):
            pass
        forget()
        monkeypatch.setattr(compilers, "Child", refuse)
    assert fake.loads == ["_gather_pair"] * 2


def die(payload, report):
    """Entry of a process that ends at once."""
    os._exit(3)


def hang(payload, report):
    """Entry of a process that never answers."""
    signal.pause()


def full(payload, report):
    """Entry of a process that can write nothing."""
    from triton.runtime.cache import FileCacheManager

    FileCacheManager.put = no_room
    compiler_process.serve(payload, report)


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("entry", ["die", "hang"])
def test_a_process_that_does_not_answer_is_done_without(fake, monkeypatch, asked, entry):
    monkeypatch.setattr(compilers, "ENTRY", f"{HERE}:{entry}")
    monkeypatch.setattr(compilers, "LIMIT_S", 60.0 if entry == "die" else 0.1)
    monkeypatch.setattr("pagemill.model.kernels.triton.together.current_cpus", lambda: [0])
    with compile_together(steps(gather, multiply)):
        pass
    assert sorted(fake.loads) == ["_gated_many", "_gather_pair"]
    assert len(asked) == 1


def test_an_interrupt_waits_for_no_process(fake, monkeypatch):
    monkeypatch.setattr(compilers, "ENTRY", f"{HERE}:hang")
    asked = threading.Event()
    compile_there = compilers.Compiler.compile

    def compile_and_tell(self, order):
        asked.set()
        return compile_there(self, order)

    monkeypatch.setattr(compilers.Compiler, "compile", compile_and_tell)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        only_elsewhere(patch)
        with compile_together(steps(gather, multiply)):
            asked.wait()
            raise KeyboardInterrupt
    assert not fake.loads
    assert not [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    gather()
    assert fake.loads == ["_gather_pair"]


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), RuntimeError("can't start new thread")],
)
def test_a_machine_that_has_no_more_processes(fake, monkeypatch, asked, error):
    def none_left(*_):
        raise error

    monkeypatch.setattr(compilers, "Child", none_left)
    with compile_together(steps(gather)):
        pass
    assert fake.loads == ["_gather_pair"]
    assert not asked


def test_a_disk_that_is_full_is_one_clear_error(fake, monkeypatch, asked):
    monkeypatch.setattr(compilers, "ENTRY", f"{HERE}:full")
    monkeypatch.setattr("triton.runtime.cache.FileCacheManager.put", no_room)
    message = r"compiled kernels cannot be kept in .*: No space left on device"
    with pytest.raises(ConfigError, match=message), compile_together(steps(gather)):
        gather()
    assert len(asked) == 1


def test_a_process_makes_no_other_kernel_than_was_asked_for_and_goes_on(fake, asked):
    with compile_together(steps(gather)):
        pass
    (order,) = asked
    with closing(compilers.Compiler()) as compiler:
        assert "would be another kernel here" in compiler.compile(msgspec.structs.replace(order, key="0"))
        assert "no attribute" in compiler.compile(msgspec.structs.replace(order, function="_gather_nothing"))
        assert compiler.compile(order) is None


def order_of(kernel, constants=(), **options):
    """That of a kernel, as Triton asks for it."""
    src = SimpleNamespace(signature={"x": "*bf16"}, constants=dict(constants), attrs={(0,): [["tt.divisibility", 16]]})
    target, options = SimpleNamespace(backend="cuda", arch=90, warp_size=32), SimpleNamespace(**options)
    return compilers.order_of(kernel, lambda: (src, target, options), "key")


def _nothing(x):
    pass


def test_orders_are_for_kernels_of_ours_with_plain_constants(monkeypatch):
    kernel = gated_prompts._gated_many
    plain = {(1,): None, (2,): 16, (3,): True, (4,): 0.5, (5,): "silu"}
    order = order_of(kernel, plain, num_warps=4, extern_libs=(("libdevice", "path"),))
    assert (order.module, order.function) == (kernel.__module__, "_gated_many")
    assert dict(order.constants) == plain
    assert order_of(kernel, {(1,): object()}) is None
    assert order_of(triton.jit(_nothing)) is None
    assert order_of(None) is None
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    assert order_of(kernel) is None


def test_a_folder_that_cannot_be_written_is_one_clear_error(fake, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    message = r"compiled kernels cannot be kept in .*: Not a directory; .* set TRITON_CACHE_DIR to another folder"
    with pytest.raises(ConfigError, match=message), compile_together(steps(gather)):
        pass


def test_a_folder_that_has_all_kernels_need_not_be_writable(fake, monkeypatch):
    with compile_together(steps(gather)):
        pass
    forget()
    monkeypatch.setattr("triton.runtime.cache.FileCacheManager.put", no_room)
    with compile_together(steps(gather)):
        pass
    assert fake.loads == ["_gather_pair"] * 2


@pytest.fixture
def driver_library(monkeypatch, tmp_path):
    """Something that a launcher can be linked with, where a GPU's driver would be."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    source, folder = tmp_path / "driver.c", tmp_path / "driver"
    folder.mkdir()
    source.write_text("int nothing;")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))


@pytest.mark.parametrize(("compiler", "launchers"), [("gcc", 1), ("/no/compiler", 0)])
def test_launchers_are_made_too_where_there_is_a_compiler_for_c(
    fake, driver_library, monkeypatch, tmp_path, compiler, launchers
):
    monkeypatch.setenv("CC", compiler)
    only_elsewhere(monkeypatch)
    with compile_together(steps(gather)):
        pass
    assert fake.loads == ["_gather_pair"]
    assert len(list(tmp_path.rglob("__triton_launcher*.so"))) == launchers


def compile_as_a_worker(folder, report):
    """Entry of a process like that of a worker, or of an engine core: compiles into a folder."""
    os.environ["TRITON_CACHE_DIR"] = folder.decode()
    importlib.import_module("triton.runtime.driver").driver._active = device = Device([], [])
    with compile_together(steps(gather, multiply), whole=True):
        report(b"compiling")
    report(" ".join(sorted(device.loads)).encode())


def test_workers_with_one_folder_compile_at_once(tmp_path):
    folder = str(tmp_path).encode()
    with (
        Child(f"{HERE}:compile_as_a_worker", "worker 0", folder) as first,
        Child(f"{HERE}:compile_as_a_worker", "worker 1", folder) as second,
    ):
        for worker in (first, second):
            assert worker.report(120) == b"compiling"
            assert worker.report(120) == b"_gated_many _gather_pair"
        assert first.wait(120) == second.wait(120) == 0


def wait_as_a_worker(folder, report):
    """The same, whose processes never answer."""
    compilers.ENTRY = f"{HERE}:hang"
    compile_as_a_worker(folder, report)


def test_no_process_outlives_a_worker_that_is_killed_while_it_compiles(tmp_path):
    with Child(f"{HERE}:wait_as_a_worker", "worker", str(tmp_path).encode()) as worker:
        compiling = []
        while not compiling:
            assert worker.exit_status is None
            compiling = psutil.Process(worker.pid).children()
        worker.kill()
    assert not psutil.wait_procs(compiling, 60)[1]
