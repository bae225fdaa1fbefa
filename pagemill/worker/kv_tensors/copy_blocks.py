"""`BlockCopier`: copies blocks of the KV cache. Knows nothing about layers or requests: a block is its bytes in every
tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.messages.block_copies import BlockCopies, BlockCopy
from pagemill.worker.extensions.interface import WorkerContext, WorkerExtension


class BlockCopier(WorkerExtension):
    """The workers' half of the step extension "block_copies"."""

    def __init__(self, context: WorkerContext) -> None:
        self._tensors = context.kv_tensors
        self._num_blocks = context.num_blocks

    def begin(self, payload: BlockCopies) -> None:
        copy_blocks(self._tensors, self._num_blocks, payload.copies)


def copy_blocks(tensors: Sequence[Tensor], num_blocks: int, copies: Sequence[BlockCopy]) -> None:
    """Copy all at once: a destination may be the source of another copy.

    tensors: each [num_blocks * page_bytes] uint8, block after block, all on the same device, whichever it is.
    """
    if not copies:
        return
    device = tensors[0].device
    sources = torch.tensor([copy.source for copy in copies], device=device)
    destinations = torch.tensor([copy.destination for copy in copies], device=device)
    for tensor in tensors:
        pages = tensor.view(num_blocks, -1)
        if pages.shape[1] % torch.int64.itemsize == 0:
            pages = pages.view(torch.int64)  # indexing costs by the element, not by the byte
        pages.index_copy_(0, destinations, pages.index_select(0, sources))
