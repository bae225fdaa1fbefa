"""Copy blocks of the KV cache. Knows nothing about layers or requests: a block is its bytes in every tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.messages.step import BlockCopy


def copy_blocks(tensors: Sequence[Tensor], num_blocks: int, copies: Sequence[BlockCopy]) -> None:
    """Copy all at once, on whichever device the tensors are: a destination may be the source of another copy.

    tensors: each [num_blocks * page_bytes] uint8, block after block.
    """
    if not copies:
        return
    pairs = torch.tensor([(copy.source, copy.destination) for copy in copies])
    for tensor in tensors:
        sources, destinations = pairs.to(tensor.device).unbind(1)
        pages = tensor.view(num_blocks, -1)
        pages.index_copy_(0, destinations, pages.index_select(0, sources))
