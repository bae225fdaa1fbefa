"""What followed the last tokens before is proposed, the longest match and the latest place first."""

import numpy as np
import pytest

from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.interface import ProposerContext, Speculation
from pagemill.worker.spec_decode.ngram import NgramProposer


@pytest.mark.parametrize(
    ("tokens", "proposed"),
    [
        ([], []),
        ([5], []),
        ([5, 5], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 7, 8, 9, 1, 2], [7, 8, 9]),
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9, 1]),
        ([3, 1, 2, 7, 9, 4, 1, 2, 8, 9, 3, 1, 2], [7, 9, 4]),
        ([4, 4, 4], [4]),
        ([2, 7], []),
    ],
)
def test_a_slot_proposes_what_came_before(tokens, proposed):
    states = RequestStates(3, 32)
    states.token_ids[1] = 4  # what a former request left
    states.token_ids[1, : len(tokens)] = tokens
    states.num_tokens[1] = len(tokens)
    [found] = NgramProposer(ProposerContext(states, 3, Speculation("ngram", 3))).propose(np.array([1], np.int32))
    assert found.tolist() == proposed
