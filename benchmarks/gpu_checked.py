"""`checked_us`: the time of a kernel with one choice of tiles, after a look at what it computes."""

from collections.abc import Callable
from typing import Any

import torch


def checked_us(
    run: Callable[[Any], torch.Tensor],
    weights: list,
    wanted: torch.Tensor,
    choice: object,
    measure: Callable[[], float],
) -> float:
    """What `measure` gives; infinity, with a line that says why, where run(weights[0]) cannot run, is off from `wanted`
    by more than 2% of its largest, or does not repeat bit by bit. Tiles that do not fit the GPU need no line."""
    try:
        result = run(weights[0])
        again = run(weights[0])
    except Exception as error:
        if "out of resource" not in str(error).lower():
            print(f"    {choice}: {type(error).__name__}: {str(error)[:200]}")
        return float("inf")
    wrong = (result.float() - wanted.float()).abs().max().item() / wanted.abs().max().item()
    if not wrong < 0.02 or not torch.equal(result, again):
        print(f"    {choice}: off by {wrong:.3f}, {'repeats' if torch.equal(result, again) else 'does not repeat'}")
        return float("inf")
    return measure()
