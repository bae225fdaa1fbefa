"""`Exchange`: tokens of all replicas to the ranks that hold their experts, and the results back.

Knows nothing about experts. Each rank gets the tokens of all replicas and computes its share for each; the shares are
added up. That is more volume than sending each token only where it is wanted, but every transfer is of one size, known
without asking which experts were chosen, and a rank that gets no token takes part like any other.
"""

import torch
from torch import Tensor

from pagemill.model.distributed.group import Group
from pagemill.model.forward_context import ForwardContext, current_forward


class Exchange:
    """Between the replicas in `dp`, whose ranks together are `ep`. One per model: the number of tokens that each
    replica has is exchanged once per forward pass, by the first layer that asks."""

    def __init__(self, dp: Group, ep: Group) -> None:
        self._dp = dp
        self._ep = ep
        self._counted: ForwardContext | None = None
        self._counts: list[int] = []

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Each [T, ...] -> [P, ...] of all replicas, one after the other, each filled up to the longest."""
        longest = max(self._count(len(tensors[0])))
        return [self._dp.all_gather(_padded(tensor, longest), dim=0) for tensor in tensors]

    def add_up(self, shares: Tensor) -> Tensor:
        """[P, E] shares of each rank of `ep` -> [T, E], the sums for this replica's tokens."""
        longest = max(self._counts)
        start = self._dp.rank * longest
        return self._ep.all_reduce(shares.contiguous())[start : start + self._counts[self._dp.rank]]

    def _count(self, num_tokens: int) -> list[int]:
        context = current_forward()
        if self._counted is not context:
            self._counts = self._dp.all_gather(torch.tensor([num_tokens]), dim=0).tolist()
            self._counted = context
        return self._counts


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    """Filled up with zeros: expert 0 with weight 0."""
    missing = num_rows - len(tensor)
    if not missing:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
