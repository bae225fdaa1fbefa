"""`QueryGrowth`: queries that grow with the logarithm of their positions (Llama 4). Knows nothing about attention."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class GrowthTable(NamedTuple):
    """What queries are multiplied by, as native code takes it."""

    factors: Tensor
    """[n] float32: of a query at a position, the one at (position + 1) // step."""
    step: int


@dataclass(frozen=True)
class QueryGrowth:
    """[T, H, D], positions [T] -> [T, H, D]: each query times 1 + scale * log(1 + (position + 1) // step)."""

    step: int
    scale: float
    max_positions: int

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        if positions.is_cpu:
            factors = self.table[(positions + 1) // self.step]
        else:
            factors = self._factors(torch.floor((positions.float() + 1) / self.step))
        return (query * factors[:, None, None]).to(query.dtype)

    def native(self) -> GrowthTable:
        """The same as native code takes it."""
        return GrowthTable(self.table, self.step)

    @cached_property
    def table(self) -> Tensor:
        """The factors of all positions, on the host."""
        return self._factors(torch.arange(self.max_positions // self.step + 1, dtype=torch.float32, device="cpu"))

    def _factors(self, steps: Tensor) -> Tensor:
        return torch.log1p(steps) * self.scale + 1
