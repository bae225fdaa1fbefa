"""The parts of a decode step around the network, in Triton, against their definitions."""

import torch

from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.triton import batching  # isort: skip


def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_begin_decode():
    slots, next_positions = ints([2, 0, 4], torch.int32), ints([7, 0, 0])
    last_tokens = ints([10, 11, 12, 13, 14])
    token_ids, positions, seq_lens = ints([0] * 4), ints([-5] * 4), ints([0] * 4, torch.int32)
    batching.begin_decode(slots, next_positions, last_tokens, token_ids[:3], positions[:3], seq_lens[:3])
    assert token_ids.tolist() == [12, 10, 14, 0]
    assert positions.tolist() == [7, 0, 0, -5]
    assert seq_lens.tolist() == [8, 1, 1, 0]
    assert next_positions.tolist() == [8, 1, 0], "padding stays where it is"


def test_gather_tables():
    table = torch.arange(4 * 1500, dtype=torch.int32, device=DEVICE).view(4, 1500)
    slots, positions = ints([1, 3, 0], torch.int32), ints([33, 0, 16])
    rows = torch.zeros(3, 1500, dtype=torch.int32, device=DEVICE)
    slot_mapping = ints([0, 0, 0])
    batching.gather_tables(slots, positions, table, 16, rows, slot_mapping)
    assert torch.equal(rows, table[slots.long()])
    assert slot_mapping.tolist() == [1502 * 16 + 1, -1, 1 * 16]


def test_end_step_takes_turns():
    last_tokens, results, turn = ints([0] * 5), torch.zeros(3, 4, dtype=torch.int32, device=DEVICE), ints([1])
    for sampled in ([5, 6], [7, 8], [9, 10]):
        batching.end_step(ints([3, 1], torch.int32), ints(sampled), last_tokens, results, turn)
    assert last_tokens.tolist() == [0, 10, 0, 9, 0]
    assert results[:, :2].tolist() == [[9, 10], [5, 6], [7, 8]]
    assert turn.tolist() == [1]


def test_gather_pair():
    first, second = torch.randn(50, 24, device=DEVICE), torch.randn(50, 24, device=DEVICE)
    indices = ints([3, 49, 0, 3])
    for actual, table in zip(batching.gather_pair(first, second, indices), (first, second), strict=True):
        assert torch.equal(actual, table[indices])
