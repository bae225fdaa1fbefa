"""How kernels are launched: sizes as powers of two, whether a kernel may start before the last one has ended, and
whether it is launched at all or only compiled.

Knows no kernel. Programmatic dependent launch (CUDA, compute capability 9.0 up): a kernel of ours lets the next one
start at once, and reads what another kernel wrote only after `gdc_wait`, so launch and prologue cost nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from pagemill import envs

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types that the kernels compute."""


@dataclass(slots=True)
class _Mode:
    dependent: bool | None
    """None: as this machine can; found when it is first asked."""


_mode = _Mode(envs.dependent_launch())
_launches: ContextVar[bool] = ContextVar("launches", default=True)
"""Of this thread: another engine of the process goes on launching."""
_compiled: ContextVar[Any] = ContextVar("compiled", default=None)


def on(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, the way all kernels are launched; inside `no_launches` a call compiles and does no more."""
    launched: Callable[..., Any] = kernel[grid] if _launches.get() else partial(_compile, kernel, grid)
    return launched


def compiled_now() -> Any:
    """The kernel that this thread asks for without launching it; None where there is none."""
    return _compiled.get()


@contextmanager
def no_launches() -> Iterator[None]:
    """Kernels are compiled in the body, and what they would write is left as it is."""
    token = _launches.set(False)
    try:
        yield
    finally:
        _launches.reset(token)


def launches() -> bool:
    """Whether kernels run, and what they write can be relied on."""
    return _launches.get()


def set_dependent(wanted: bool) -> None:
    """Turn dependent launch on or off for the kernels launched from now on; captured graphs stay as they are."""
    _mode.dependent = wanted


def dependent() -> bool:
    """Whether kernels are launched that way."""
    if _mode.dependent is None:
        _mode.dependent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return _mode.dependent


def options(num_warps: int = 4) -> dict[str, int | bool]:
    """Launch options of a kernel."""
    return {"num_warps": num_warps, "launch_pdl": True} if dependent() else {"num_warps": num_warps}


def _compile(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    token = _compiled.set(kernel)
    try:
        return kernel.run(*args, grid=grid, warmup=True, **options)
    finally:
        _compiled.reset(token)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return int(triton.next_power_of_2(size))
