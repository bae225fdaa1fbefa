import numpy as np
import torch

from pagemill.messages.grammar_masks import FormsBegun, GrammarMasks
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.batch.row_masks import ANY_TOKEN
from pagemill.worker.extensions.interface import WorkerContext
from pagemill.worker.sampling.grammar_masks import MasksOfWorker

V = 70


def masks_of(*allowed):
    words = np.zeros((len(allowed), 3), np.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)
    return words


def extension(states=None):
    return MasksOfWorker(WorkerContext(states, (), 0, V, torch.device("cpu")))


def rows_of(*slots, places=None):
    """The next token's rows of slots with 3 tokens; `places`: drafts before each."""
    return SampledRows(np.array(slots, np.int32), 3 + np.array(places or [0] * len(slots), np.int64))


def test_only_what_may_come_keeps_its_logit():
    masks = extension()
    masks.begin_sampling(GrammarMasks([5, 2], masks_of([0, 31, 69], [32])))
    logits = torch.arange(3.0 * V).view(3, V)
    before = logits.clone()
    masks.refuse(logits, rows_of(2, 9, 5))
    for row, allowed in ((0, [32]), (2, [0, 31, 69])):
        assert torch.isfinite(logits[row]).nonzero().flatten().tolist() == allowed
        assert torch.equal(logits[row, allowed], before[row, allowed])
    assert torch.equal(logits[1], before[1])


def test_masks_are_of_one_step():
    masks = extension()
    masks.begin_sampling(GrammarMasks([1], masks_of([3])))
    masks.begin_sampling(GrammarMasks([2], masks_of([3])))
    logits = torch.zeros(1, V)
    masks.refuse(logits, rows_of(1))
    assert torch.isfinite(logits).all()
    masks.begin_sampling(GrammarMasks([], np.zeros((0, 0), np.int32)))
    masks.refuse(logits, rows_of(2))
    assert torch.isfinite(logits).all()


def test_who_began_is_said_once():
    masks = extension()
    masks.begin(FormsBegun([4]))
    assert not masks.take_begun(3)
    assert masks.take_begun(4)
    assert not masks.take_begun(4)


def test_a_slot_with_drafts_has_a_mask_for_each_place():
    states = RequestStates(6, 8)
    states.num_tokens[:] = 3
    masks = extension(states)
    masks.begin_sampling(GrammarMasks([5, 2, 5, 5], masks_of([1], [2], [3], [4])))
    found = masks.masks(rows_of(2, 5, 5, 4, 4, places=[0, 0, 1, 0, 1]))
    assert found.rows.tolist() == [1, 0, 2, ANY_TOKEN, ANY_TOKEN]
    logits = torch.zeros(2, V)
    masks.refuse(logits, rows_of(5, 5, places=[1, 2]))  # a part of its rows
    assert torch.isfinite(logits).nonzero().tolist() == [[0, 3], [1, 4]]
