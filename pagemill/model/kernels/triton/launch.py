"""How kernels are launched: sizes as powers of two, and whether a kernel may start before the last one has ended.

Knows no kernel. Programmatic dependent launch (CUDA, compute capability 9.0 up): a kernel of ours lets the next one
start at once, and reads what another kernel wrote only after `gdc_wait`, so launch and prologue cost nothing.
"""

from dataclasses import dataclass

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


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return int(triton.next_power_of_2(size))
