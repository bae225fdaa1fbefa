"""Experts on a CPU that can be part of any graph: each computes all tokens, and counts for those that chose it."""

import torch
from torch import Tensor

from pagemill.model.quantization.experts import SeparateExperts


class EveryTokenExperts(SeparateExperts):
    """Reads nothing on the host."""

    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self._sizes.num_experts):
            share = torch.where(chosen == first + expert, weights, 0.0).sum(1, keepdim=True)
            out += self._expert(expert, x).float() * share
        return out.to(x.dtype)
