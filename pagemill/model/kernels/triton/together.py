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
def compile_together() -> Iterator[None]:
    """Kernels that are launched in the body are not: they are compiled after it, all at once, for the present device.

    A kernel that cannot be compiled raises its error when it is launched, as any does.
    """
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    num_threads = len(current_cpus()) or os.cpu_count() or 1
    began = time.monotonic()
    with ThreadPoolExecutor(num_threads, "compile", use_device) as threads, Together(threads) as mode:
        try:
            with launch.no_launches():
                yield
        finally:
            mode.begin.set()
    logger.debug("compiled or loaded %d kernels in %.2f s", len(mode.future_kernels), time.monotonic() - began)


class Together(AsyncCompileMode):  # type: ignore[misc]
    """A kernel is asked for once, and waits for `begin`: threads that walk Python's syntax trees would hold up who
    asks."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor, ignore_errors=True)
        self.begin = Event()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> FutureKernel:
        """The kernel as it will be, which takes its place at once, so that a second call of it costs no more than a
        launch."""
        kernel = super().submit(key, partial(self._compile, compile_fn), finalize_fn)
        finalize_fn(kernel)
        return kernel

    def _compile(self, compile_fn: Callable[[], Any]) -> Any:
        self.begin.wait()
        kernel = compile_fn()
        _ = kernel.run  # the first look at it makes the launcher and loads both
        return kernel
