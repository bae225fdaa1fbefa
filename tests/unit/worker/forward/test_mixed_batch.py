"""Any batch as one array, and back."""

import numpy as np
import pytest
import torch

from pagemill.model.kernels.batching_reference import NO_DRAFT
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedShape

PAD = 9


def batch():
    """Slot 4 computes tokens 2 to 4 of its prompt, slot 1 decodes, slot 7 computes a chunk."""
    return InputBatch(
        step_id=1,
        slots=np.array([4, 1, 7], np.int32),
        token_slots=np.array([4, 4, 4, 1, 7, 7], np.int32),
        token_ids=np.array([20, 21, 22, 0, 30, 31]),
        positions=np.array([2, 3, 4, 11, 0, 1]),
        query_start=np.array([0, 3, 4, 6], np.int32),
        seq_lens=np.array([5, 12, 2], np.int32),
        logits_index=np.array([2, 3]),
        sampled_slots=np.array([4, 1], np.int32),
        sampled_positions=np.array([5, 12]),
    )


def test_what_is_packed_is_what_the_parts_are():
    shape = MixedShape(8, 5)
    packed = shape.pack(batch(), np.array([True, False, True]), PAD)
    told = shape.tensors(torch.from_numpy(packed))
    assert packed.dtype == np.int32 and len(packed) == shape.num_elements
    assert told.tokens.slots.tolist() == [4, 4, 4, 1, 7, 7, PAD, PAD]
    assert told.tokens.known.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert told.tokens.given.tolist() == [20, 21, 22, 0, 30, 31, 0, 0]
    assert told.tokens.positions.tolist() == [2, 3, 4, 11, 0, 1, 0, 0]
    assert told.slots.tolist() == [4, 1, 7, PAD, PAD]
    assert told.query_start.tolist() == [0, 3, 4, 6, 6, 6]
    assert told.seq_lens.tolist() == [5, 12, 2, 0, 0]
    assert told.logits_index.tolist() == [2, 3, 5, 5, 5]
    assert told.sampled_slots.tolist() == [4, 1, PAD, PAD, PAD]
    assert told.sampled_positions.tolist() == [5, 12, 0, 0, 0]


def drafted():
    """Slot 4 verifies two drafts, slot 1 none, slot 7 computes a chunk."""
    return InputBatch(
        step_id=1,
        slots=np.array([4, 1, 7], np.int32),
        token_slots=np.array([4, 4, 4, 1, 7, 7], np.int32),
        token_ids=np.array([20, 21, 22, 40, 30, 31]),
        positions=np.array([8, 9, 10, 11, 0, 1]),
        query_start=np.array([0, 3, 4, 6], np.int32),
        seq_lens=np.array([11, 12, 2], np.int32),
        logits_index=np.array([0, 1, 2, 3]),
        sampled_slots=np.array([4, 4, 4, 1], np.int32),
        sampled_positions=np.array([9, 10, 11, 12]),
    )


def test_what_is_verified_is_packed_too():
    shape = MixedShape(8, 5, 6)
    told = shape.tensors(torch.from_numpy(shape.pack_drafts(drafted(), PAD)))
    assert told.tokens.known.tolist() == [1] * 8
    assert told.slots.tolist() == [4, 1, 7, PAD, PAD]
    assert told.logits_index.tolist() == [0, 1, 2, 3, 0, 0]
    assert told.sampled_slots.tolist() == [4, 4, 4, 1, PAD, PAD]
    assert told.sampled_positions.tolist() == [9, 10, 11, 12, 0, 0]
    assert told.drafts.slots.tolist() == [4, 1, PAD, PAD, PAD]
    assert told.drafts.first_rows.tolist() == [0, 3, 0, 0, 0]
    assert told.drafts.ids.tolist() == [21, 22, NO_DRAFT, NO_DRAFT, NO_DRAFT, NO_DRAFT]
    exact = told.first(4, 2)
    assert exact.sampled_slots.tolist() == [4, 4, 4, 1]
    assert exact.drafts.slots.tolist() == [4, 1] and len(exact.drafts.ids) == 4
    assert shape.verification(6) == BatchBounds(8, 0, 6, None, decode_len=6)
    assert shape.tensors(torch.zeros(shape.num_elements)).drafts is not None
    assert MixedShape(8, 5).tensors(torch.zeros(shape.num_elements)).drafts is None


def test_parts_are_views_that_kernels_may_read_by_sixteen_bytes():
    memory = torch.zeros(MixedShape(13, 3).num_elements, dtype=torch.int32)
    told = MixedShape(13, 3).tensors(memory)
    for part in (told.tokens.slots, told.tokens.given, told.slots, told.query_start, told.sampled_positions):
        assert (part.data_ptr() - memory.data_ptr()) % 16 == 0
        part.fill_(1)
    assert memory.sum() == 13 + 13 + 3 + 4 + 3


def test_the_extent_of_a_batch_and_of_all_that_are_padded_to_a_shape():
    assert BatchBounds.of(batch()) == BatchBounds(6, 1, 3, 12, asks_for_ends=True)
    assert BatchBounds.of(drafted()) == BatchBounds(6, 1, 3, 12), "rows in the middle of a request are read, too"
    assert MixedShape(8, 5).bounds == BatchBounds(8, 0, 8, None)
    assert MixedShape(8, 1).bounds == BatchBounds(8, 2, 8, None), "one request with one token decodes"
    assert MixedShape(1, 1).bounds.min_query_len == 0


@pytest.mark.parametrize(
    ("shape", "longest"), [((16, 3), 100), ((16, 1), 100), ((16, 1), 10), ((16, 16), 100), ((7, 2), 3)]
)
def test_padding_alone_is_as_much_work_as_fits(shape, longest):
    shape = MixedShape(*shape)
    found = shape.padding(PAD, longest)
    assert found.num_tokens == min(shape.num_tokens, shape.num_requests * longest)
    assert len(found.slots) == len(found.seq_lens) == shape.num_requests and found.max_seq_len <= longest
    assert set(found.token_slots) == set(found.sampled_slots) == {PAD}
    assert shape.pack(found, np.ones(len(found.slots), bool), PAD).shape == (shape.num_elements,)
