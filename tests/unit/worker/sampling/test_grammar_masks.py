import numpy as np
import torch

from pagemill.messages.grammar_masks import FormsBegun, GrammarMasks
from pagemill.worker.extensions.interface import WorkerContext
from pagemill.worker.sampling.grammar_masks import MasksOfWorker

V = 70


def masks_of(*allowed):
    words = np.zeros((len(allowed), 3), np.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)
    return words


def extension():
    return MasksOfWorker(WorkerContext(None, (), 0, V, torch.device("cpu")))


def test_only_what_may_come_keeps_its_logit():
    masks = extension()
    masks.begin_sampling(GrammarMasks([5, 2], masks_of([0, 31, 69], [32])))
    logits = torch.arange(3.0 * V).view(3, V)
    before = logits.clone()
    masks.refuse(logits, np.array([2, 9, 5], np.int32))
    for row, allowed in ((0, [32]), (2, [0, 31, 69])):
        assert torch.isfinite(logits[row]).nonzero().flatten().tolist() == allowed
        assert torch.equal(logits[row, allowed], before[row, allowed])
    assert torch.equal(logits[1], before[1])


def test_masks_are_of_one_step():
    masks = extension()
    masks.begin_sampling(GrammarMasks([1], masks_of([3])))
    masks.begin_sampling(GrammarMasks([2], masks_of([3])))
    logits = torch.zeros(1, V)
    masks.refuse(logits, np.array([1], np.int32))
    assert torch.isfinite(logits).all()
    masks.begin_sampling(GrammarMasks([], np.zeros((0, 0), np.int32)))
    masks.refuse(logits, np.array([2], np.int32))
    assert torch.isfinite(logits).all()


def test_who_began_is_said_once():
    masks = extension()
    masks.begin(FormsBegun([4]))
    assert not masks.take_begun(3)
    assert masks.take_begun(4)
    assert not masks.take_begun(4)
