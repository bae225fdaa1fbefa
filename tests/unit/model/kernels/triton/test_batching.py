"""The kernels around a step in Triton against plain torch."""

import pytest
import torch

from pagemill.model.kernels import batching_reference as reference
from pagemill.model.kernels.batching_reference import SlotTokens, TableRows
from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.triton import batching as kernels  # isort: skip

SLOTS, COLUMNS, PAGE = 9, 300, 4


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def table(seed):
    blocks = torch.randint(
        1, 900, (SLOTS + 1, COLUMNS), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    blocks[-1] = 0
    return blocks.to(DEVICE)


def last_tokens():
    return torch.arange(100, 101 + SLOTS, device=DEVICE)


def decode(module):
    slots = ints(3, 0, 8, SLOTS, SLOTS)
    next_positions = ints(0, 7, 900, 0, 0, dtype=torch.int64)
    count = len(slots)
    written = [torch.full((count,), -7, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.int64, torch.int32)]
    groups = [
        TableRows(
            table(seed),
            PAGE,
            torch.zeros(count, COLUMNS, dtype=torch.int32, device=DEVICE),
            torch.zeros(count, dtype=torch.int64, device=DEVICE),
        )
        for seed in (0, 1)
    ]
    module.begin_decode(slots, next_positions, last_tokens(), *written, groups)
    needed = [group.rows[row, : int(written[2][row] + PAGE - 1) // PAGE] for group in groups for row in range(count)]
    return [next_positions, *written, *(group.slot_mapping for group in groups), torch.cat(needed)]


def place(module):
    count = 300
    generator = torch.Generator().manual_seed(5)
    tokens = [
        torch.randint(0, high, (count,), generator=generator, dtype=torch.int32).to(DEVICE)
        for high in (SLOTS + 1, 2, 1000, PAGE * COLUMNS)
    ]
    token_ids, positions, *mappings = (torch.zeros(count, dtype=torch.int64, device=DEVICE) for _ in range(4))
    groups = [(table(seed), PAGE, mapping) for seed, mapping in enumerate(mappings)]
    module.place_tokens(SlotTokens(*tokens), last_tokens(), token_ids, positions, groups)
    return [token_ids, positions, *mappings]


def end(module):
    tokens, turn = last_tokens(), ints(0, dtype=torch.int64)
    results = torch.zeros(4, 6, dtype=torch.int32, device=DEVICE)
    for step in range(6):
        sampled = ints(11 + step, -1 if step == 2 else 12, 13, dtype=torch.int64)
        module.end_step(ints(4, step, 7), sampled, tokens, results, turn)
    return [tokens, turn, results]


def verify(module):
    """Slots 4, 0 and 7, of which the second has no drafts, then two of padding; a step of one row after it."""
    tokens, turn = last_tokens(), ints(2, dtype=torch.int64)
    results = torch.zeros(4, 60, dtype=torch.int32, device=DEVICE)
    drafts = ints(11, 12, -2, -2, 30, 31, 32, -2, -2, -2)
    for third in (30, 33, -1):
        sampled = ints(11, 12, 13, 20, third, 9, 32, 33, 5, 6, dtype=torch.int64)
        slots, first_rows = ints(4, 0, 7, SLOTS, SLOTS), ints(0, 3, 4, 8, 9)
        module.end_verification(slots, first_rows, drafts, sampled, tokens, results, turn)
    many = 40
    first_rows = torch.arange(many, dtype=torch.int32, device=DEVICE)
    module.end_verification(
        torch.full_like(first_rows, SLOTS), first_rows, torch.full_like(first_rows, -2), first_rows.long(), tokens,
        torch.zeros(4, 2 * many, dtype=torch.int32, device=DEVICE), turn,
    )  # fmt: skip
    return [tokens[:SLOTS], turn, results]


def test_verified_tokens_are_the_drafts_up_to_the_first_that_is_wrong():
    tokens, turn, results = verify(reference)
    assert turn.tolist() == [2]
    assert results[2, 10:13].tolist() == [3, 1, 2]
    assert results[3, :13].tolist() == [11, 12, 13, 20, 33, 9, 32, 33, 5, 6, 3, 1, 1]
    assert results[0, 10:13].tolist() == [3, 1, 1]
    assert tokens[[4, 0, 7]].tolist() == [13, 20, 0], "a token that could not be sampled is computed as 0"


def guess(module):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5000, generator=generator).to(DEVICE)
    logits[1, 70] = torch.nan
    logits[2, 80] = torch.inf
    logits[3, 4999] = 50.0
    tokens_of = torch.arange(1000, 6000, device=DEVICE)
    drafts = torch.full((2, 4, 3), 7, dtype=torch.int32, device=DEVICE)
    tokens = last_tokens()
    for place, given in enumerate((None, tokens_of)):
        module.keep_guesses(logits, given, ints(4, 0, 7, 2), tokens, drafts[place, :, 1])
    return [tokens, drafts]


def test_guesses_are_the_most_likely_tokens():
    tokens, drafts = guess(reference)
    assert drafts[0, 1:, 1].tolist() == [-1, -1, 4999]
    assert drafts[1, 1:, 1].tolist() == [-1, -1, 5999]
    assert drafts[:, :, ::2].unique().tolist() == [7]
    assert tokens[[0, 7, 2]].tolist() == [0, 0, 5999], "a guess that is none is computed as token 0"


def write(module):
    blocks = table(0)
    module.write_places(blocks, ints(0, COLUMNS + 3, 5), ints(77, 78, 79))
    return [blocks]


@pytest.mark.parametrize("work", [decode, place, end, verify, guess, write])
def test_as_plain_torch(work):
    for actual, expected in zip(work(kernels), work(reference), strict=True):
        assert actual.tolist() == expected.tolist()


def test_padding_stays_where_it_is():
    next_positions, _, _, seq_lens, mapping, *_ = decode(reference)
    assert next_positions.tolist() == [1, 8, 901, 0, 0]
    assert seq_lens.tolist() == [1, 8, 901, 1, 1]
    assert mapping.tolist()[3:] == [-1, -1]


def test_tokens_of_the_padding_go_nowhere():
    _, _, *mappings = place(reference)
    assert all(int((mapping == -1).sum()) > 0 and int(mapping.min()) == -1 for mapping in mappings)


def test_gather_pair():
    first, second = torch.randn(50, 24, device=DEVICE), torch.randn(50, 24, device=DEVICE)
    indices = ints(3, 49, 0, 3, dtype=torch.int64)
    for actual, rows in zip(kernels.gather_pair(first, second, indices), (first, second), strict=True):
        assert torch.equal(actual, rows[indices])
