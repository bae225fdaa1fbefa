"""Blocks are copied in every tensor, all at once."""

import torch

from pagemill.messages.block_copies import BlockCopy
from pagemill.worker.kv_tensors.copy_blocks import copy_blocks


def make_tensors(num_tensors=2, num_blocks=5, page_bytes=6):
    pages = torch.arange(num_blocks, dtype=torch.uint8).repeat_interleave(page_bytes)
    return [pages + 100 * index for index in range(num_tensors)]


def blocks(tensors):
    """The value that fills each block of each tensor."""
    views = [tensor.view(5, 6) for tensor in tensors]
    assert all((view == view[:, :1]).all() for view in views)
    return [view[:, 0].tolist() for view in views]


def test_a_block_is_copied_in_every_tensor():
    tensors = make_tensors()
    copy_blocks(tensors, 5, [BlockCopy(1, 3)])
    assert blocks(tensors) == [[0, 1, 2, 1, 4], [100, 101, 102, 101, 104]]


def test_sources_are_read_before_any_destination_is_written():
    tensors = make_tensors(1)
    copy_blocks(tensors, 5, [BlockCopy(1, 2), BlockCopy(2, 1), BlockCopy(2, 4)])
    assert blocks(tensors) == [[0, 2, 1, 3, 2]]


def test_nothing_to_copy_changes_nothing():
    tensors = make_tensors(1)
    copy_blocks(tensors, 5, [])
    assert blocks(tensors) == [[0, 1, 2, 3, 4]]
