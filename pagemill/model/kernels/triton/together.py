"""Compiling many kernels at once, on threads: MLIR and LLVM do not hold Python's lock, and the assembler, and the C
compiler for the launcher that each signature has, are processes of their own.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import torch
from triton import AsyncCompileMode, FutureKernel

from pagemill.log import get_logger
from pagemill.model.kernels.triton import launch
from pagemill.utils.cpu_affinity import current_cpus

logger = get_logger(__name__)


@contextmanager
def compile_together(rehearsal: Callable[[], None]) -> Iterator[None]:
    """The kernels that `rehearsal` launches are not launched, but compiled for the present device, all at once while
    the body runs; after it, all are there. A launch in the body waits for its own kernel.

    A kernel that cannot be compiled raises its error when it is launched, as any does.
    """
    began = time.monotonic()
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    num_threads = len(current_cpus()) or os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads, "compile", use_device) as threads, Together(threads) as mode:
        try:
            with launch.no_launches():
                rehearsal()
        finally:
            mode.begin.set()
        yield
    logger.debug("compiled or loaded %d kernels in %.2f s", len(mode.future_kernels), time.monotonic() - began)


class Together(AsyncCompileMode):  # type: ignore[misc]
    """Each kernel is compiled once, and not before `begin`: threads that walk Python's syntax trees would hold up who
    asks for more."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(threads)
        self.begin = Event()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> FutureKernel:
        """The kernel as it will be. It takes its place at once, so that calling it again costs no more than a launch,
        and leaving the mode waits for nothing."""
        kernel = self.future_kernels.get(key)
        if kernel is None:
            kernel = FutureKernel(finalize_fn, self.executor.submit(self._compile, compile_fn))
            self.future_kernels[key] = kernel
        finalize_fn(kernel)
        return kernel

    def _compile(self, compile_fn: Callable[[], Any]) -> Any:
        self.begin.wait()
        kernel = compile_fn()
        _ = kernel.run  # the first look at it makes the launcher and loads both
        return kernel
