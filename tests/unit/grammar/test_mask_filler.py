import contextlib

import numpy as np
import pytest

from pagemill.grammar.interface import GrammarTooComplexError, num_words
from pagemill.grammar.mask_filler import MaskFiller
from tests.fakes.byte_vocabulary import TABLE, Following

WORDS = num_words(len(TABLE.tokens))
FORMS = [{"choice": ["ab", "ac"]}, {"regex": "[0-9]{3}x?"}, {"json": {"type": "object"}}, {"json": {"enum": [1, "b"]}}]


@pytest.fixture(autouse=True, params=[2, 8])
def num_cpus(request, monkeypatch):
    """With few, masks are made where they are asked for."""
    monkeypatch.setattr("os.cpu_count", lambda: request.param)


def matcher_of(vocabulary, **form):
    return vocabulary.matcher(**form)


def test_masks_of_several_outputs_are_those_of_each(vocabulary):
    """At every token of outputs that are drawn from the masks, one of which ends before the others."""
    together = [matcher_of(vocabulary, **form) for form in FORMS]
    alone = [matcher.copy() for matcher in together]
    filler, rng = MaskFiller(), np.random.default_rng(0)
    for _ in range(8):
        masks = np.full((len(together), WORDS), 77, np.int32)
        assert filler.fill(together, masks) == [None] * len(together)
        for matcher, mask, other in zip(together, masks, alone, strict=True):
            expected = np.zeros(WORDS, np.int32)
            other.fill(expected)
            assert np.array_equal(mask, expected)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            if not matcher.ended:
                matcher.accept([token])
                other.accept([token])


@pytest.mark.parametrize("beside", [0, 2])
def test_an_output_beyond_the_limits_is_told_and_others_have_their_masks(beside):
    vocabulary = Following("guidance")
    large = matcher_of(vocabulary, regex="x(a{1,300}){300}")
    others = [matcher_of(vocabulary, choice=["ab"]) for _ in range(beside)]
    filler = MaskFiller()
    expected = np.zeros(WORDS, np.int32)
    expected[ord("a") // 32] = 1 << ord("a") % 32
    problems: list[str | None] = [None]
    for token in b"x" + b"a" * 400:
        with contextlib.suppress(GrammarTooComplexError):
            large.accept([token])
        masks = np.zeros((1 + beside, WORDS), np.int32)
        problems = filler.fill([large, *others], masks)
        assert all(np.array_equal(mask, expected) for mask in masks[1:])
        if problems[0]:
            break
    assert problems[0]
    assert problems[1:] == [None] * beside


def test_no_outputs_have_no_masks():
    assert MaskFiller().fill([], np.zeros((0, WORDS), np.int32)) == []
