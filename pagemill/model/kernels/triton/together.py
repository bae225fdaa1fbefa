"""Compiling many kernels at once, on threads: MLIR and LLVM do not hold Python's lock, and the assembler, and the C
compiler for the launcher that each signature has, are processes of their own.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, PriorityQueue
from threading import Event
from typing import Any, NamedTuple

import torch
import triton
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.cache import get_cache_manager

from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.model.kernels.triton import early, launch, modules
from pagemill.model.kernels.triton.compilers import Compilers, order_of
from pagemill.model.kernels.triton.kernel_order import KernelOrder
from pagemill.model.kernels.triton.source_length import source_length
from pagemill.utils.cpu_affinity import current_cpus
from pagemill.utils.disk_errors import disk_problem

logger = get_logger(__name__)

LONG = 9_000
"""Characters of a kernel's source from which on it takes a second or more to compile: these are begun first."""

MOST_AT_ONCE = 16
"""Kernels: more would end no sooner, as the longest take as long as a sixteenth of all."""


@contextmanager
def compile_together(precompilation: Iterable[None], whole: bool = False) -> Iterator[None]:
    """The kernels that the steps of `precompilation` launch are not launched, but compiled for the present device, all
    at once while the body runs; after it, all are there. A launch in the body waits for its own kernel.

    If all of the first step is on disk, so is the rest, but for rare cases: there is no second step then, unless the
    precompilation is to be `whole`. A kernel that cannot be compiled raises its error when it is launched, as any does.
    An error of the steps or of the body, such as an interrupt, waits for no kernel: those that are not there yet are
    compiled when they are launched.
    """
    began = time.monotonic()
    modules.keep_apart()
    early.begin().join()
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    num_threads = min(len(current_cpus()) or os.cpu_count() or 1, MOST_AT_ONCE)
    with (
        Compilers() as compilers,
        ThreadPoolExecutor(num_threads, "compile") as threads,
        Together(threads, use_device, compilers) as mode,
    ):
        try:
            mode.precompile(precompilation, whole)
            yield
        except BaseException:
            mode.give_up()
            raise
    logger.debug("compiled or loaded %d kernels in %.2f s", len(mode.future_kernels), time.monotonic() - began)


class _Asked(NamedTuple):
    """A kernel to compile. The least comes first: long ones, then as they were asked for."""

    rank: int
    number: int
    compile_fn: Callable[[], Any]
    order: KernelOrder | None
    """For another process; None where the kernel is on disk, or is to be compiled by this one."""
    future: Future[Any]
    """Cancelled when this was given up."""


class Together(AsyncCompileMode):  # type: ignore[misc]
    """Each kernel is compiled once, and none before `begin`."""

    def __init__(
        self, threads: ThreadPoolExecutor, use_device: Callable[[], None] | None, compilers: Compilers
    ) -> None:
        """`use_device`: makes the device that kernels are for a thread's own."""
        super().__init__(threads)
        self._use_device = use_device
        self._compilers = compilers
        self.begin = Event()
        self.num_missing = 0
        """Kernels that are not on disk."""
        self._asked: PriorityQueue[_Asked] = PriorityQueue()
        self._numbers = count()
        self._given_up = False

    def precompile(self, steps: Iterable[None], whole: bool) -> None:
        """The steps, or the first one where nothing is missing after it. The threads begin after the first, so that
        those kernels that take longest are known."""
        try:
            with launch.no_launches():
                for _ in steps:
                    if not (whole or self.num_missing):
                        break
                    self.begin.set()
        finally:
            self.begin.set()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> FutureKernel:
        """The kernel as it will be. It takes its place at once, so that calling it again costs no more than a launch,
        and leaving the mode waits for nothing."""
        kernel = self.future_kernels.get(key)
        if kernel is None:
            missing = not _on_disk(key)
            self.num_missing += missing
            order = order_of(launch.compiled_now(), compile_fn, key) if missing else None
            asked = _Asked(_rank(), next(self._numbers), compile_fn, order, Future())
            self._asked.put(asked)
            self.executor.submit(self._compile_next, order is not None)
            kernel = _Awaited(finalize_fn, asked, self.begin)
            self.future_kernels[key] = kernel
        finalize_fn(kernel)
        return kernel

    def give_up(self) -> None:
        """Compile no more, but for what threads compile in this process by now."""
        self._given_up = True
        self.executor.shutdown(wait=False, cancel_futures=True)
        self._compilers.kill()
        with suppress(Empty):
            while True:
                self._asked.get_nowait().future.cancel()

    def _compile_next(self, elsewhere: bool) -> None:
        if elsewhere:  # not only once the thread has something to compile, for a process takes a while to start
            self._compilers.start()
        self.begin.wait()
        try:
            asked = self._asked.get_nowait()
        except Empty:  # given up
            return
        try:
            if asked.order is not None and not self._given_up:
                self._compilers.compile(asked.order)
            if self._given_up:
                asked.future.cancel()
                return
            if self._use_device is not None:
                self._use_device()
            asked.future.set_result(_compiled(asked.compile_fn))
        except BaseException as error:
            asked.future.set_exception(error)


class _Awaited(FutureKernel):  # type: ignore[misc]
    """A kernel whose launch in the midst of a precompilation lets the threads begin, instead of waiting for ever, and
    compiles it where they have given it up."""

    def __init__(self, finalize: Callable[[Any], None], asked: _Asked, begin: Event) -> None:
        super().__init__(finalize, asked.future)
        self._compile_fn = asked.compile_fn
        self._begin = begin

    def result(self, ignore_errors: bool = False) -> Any:
        self._begin.set()
        if self.future.cancelled():
            compiled: Future[Any] = Future()
            compiled.set_result(_compiled(self._compile_fn))
            self.future: Future[Any] = compiled
        return super().result(ignore_errors)


def _compiled(compile_fn: Callable[[], Any]) -> Any:
    with _clear_disk_errors():
        kernel = compile_fn()
        _ = kernel.run  # the first look at it makes the launcher and loads both
        return kernel


@contextmanager
def _clear_disk_errors() -> Iterator[None]:
    """Raises ConfigError for errors of the body that come from the disk."""
    try:
        yield
    except Exception as error:
        problem = disk_problem(error)
        if problem is None:
            raise
        raise ConfigError(
            f"compiled kernels cannot be kept in {triton.knobs.cache.dir}: {problem}; make room there, or set "
            "TRITON_CACHE_DIR to another folder"
        ) from error


def _rank() -> int:
    kernel = launch.compiled_now()
    length = 0 if kernel is None else source_length(kernel)
    return -length if length >= LONG else 0


def _on_disk(key: str) -> bool:
    """Whether Triton's cache has the kernel; False of a cache that is no folder. Raises ConfigError for one that cannot
    be written, which Triton wants to be possible."""
    with _clear_disk_errors():
        folder = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return folder is not None and any(Path(folder).glob("*.cubin"))
