"""States that outputs of one form share, and run out."""

import random

import numpy as np
import pytest

from pagemill.grammar.backends import guidance
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.interface import num_words
from pagemill.grammar.mask_filler import MaskFiller
from pagemill.grammar.translate import translated
from pagemill.messages.structured_outputs import StructuredOutputsParams
from tests.fakes.byte_vocabulary import TABLE

MANY_STATES = translated(StructuredOutputsParams(regex="(.*a.{9}b)|(.*c.{10}d)"))


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(guidance, "MAX_LEXER_STATES", 3000)
    monkeypatch.setattr(guidance, "LEAST_USES", 50)
    return GuidanceBackend(TABLE)


def an_output(matchers, seed, length=30):
    """Random letters that each of the matchers follows, masks and all; the masks."""
    rng = random.Random(seed)
    masks = np.zeros((len(matchers), num_words(len(TABLE.tokens))), np.int32)
    found = []
    filler = MaskFiller()
    for _ in range(length):
        assert filler.fill(matchers, masks) == [None] * len(matchers)
        found.append(masks.copy())
        for matcher in matchers:
            letter = rng.choice(b"abcd")
            if matcher.accept([letter]) == 0:
                assert matcher.ended
                return found
    return found


@pytest.mark.parametrize("together", [1, 3])
def test_an_output_goes_on_when_shared_states_run_out(backend, together):
    """Each goes on as it would have with states of its own."""
    first = backend.matcher(MANY_STATES)
    outputs = [first.copy() for _ in range(together)]
    for seed in range(12):
        outputs = [first.copy() for _ in range(together)]
        shared = an_output(outputs, seed)
        alone = an_output([backend.matcher(MANY_STATES).copy() for _ in range(together)], seed)
        assert np.array_equal(shared, alone)
    assert first.worn
    assert outputs[0]._states is not first._states
