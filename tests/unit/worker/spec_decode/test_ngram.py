"""What followed the last tokens before is proposed, the longest match and the latest place first."""

import numpy as np
import pytest

from pagemill.errors import ConfigError
from pagemill.model.kernels.native import library
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode import ngram
from pagemill.worker.spec_decode.index_reference import PythonNgramIndex
from pagemill.worker.spec_decode.interface import ProposerContext, Speculation
from pagemill.worker.spec_decode.ngram import NgramProposer
from tests.fakes.drafts import fill, new_request


@pytest.fixture(params=["compiled", "python"], autouse=True)
def index(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(ngram, "ngram_index", PythonNgramIndex)
    else:
        assert library() is not None


def proposer_of(states, max_drafts=3, **settings):
    return NgramProposer(ProposerContext(states, max_drafts, Speculation("ngram", max_drafts, **settings)))


def proposed(states, proposer, slot, tokens):
    fill(states, slot, tokens)
    [found] = proposer.propose(np.array([slot], np.int32))
    return found.tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([5], []),
        ([5, 5], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 7, 8, 9, 1, 2], [7, 8, 9]),
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9, 1]),
        ([3, 1, 2, 7, 9, 4, 1, 2, 8, 9, 3, 1, 2], [7, 9, 4]),
        ([4, 4, 4], [4, 4, 4]),
        ([9, 1, 2, 1, 2, 1, 2], [1, 2, 1]),
        ([2, 7], []),
    ],
)
def test_a_slot_proposes_what_came_before(tokens, expected):
    states = RequestStates(3, 32)
    states.token_ids[1] = 4  # what a former request left
    assert proposed(states, proposer_of(states), 1, tokens) == expected


def test_the_settings_say_how_many_tokens_are_looked_for():
    states = RequestStates(1, 32)
    one = proposer_of(states, prompt_lookup_min=1, prompt_lookup_max=1)
    assert proposed(states, one, 0, [1, 2, 7, 3, 2]) == [7, 3, 2]
    three = proposer_of(states, prompt_lookup_min=3, prompt_lookup_max=3)
    assert proposed(states, three, 0, [1, 2, 7, 3, 1, 2]) == []
    assert proposed(states, three, 0, [1, 2, 7, 3, 1, 2, 7]) == [3, 1, 2]


def test_a_text_that_grows_proposes_what_it_would_as_a_whole():
    states = RequestStates(2, 400)
    tokens = np.random.default_rng(1).integers(0, 6, 390).tolist()
    growing = proposer_of(states)
    for count in [5, 6, 7, 90, 91, 200, 390]:
        whole = proposer_of(states)
        assert proposed(states, growing, 0, tokens[:count]) == proposed(states, whole, 1, tokens[:count])


COPIED = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ([14, 15, 16, 17, 18, 19], [20, 21, 22]),
        ([14, 15, 16, 17, 18, 99], [20, 21, 22]),  # another token
        ([14, 15, 16, 17, 18, 99, 20], [21, 22, 98]),
        ([14, 15, 16, 17, 18, 20], [21, 22, 98]),  # one is left out
        ([14, 15, 16, 17, 18, 99, 19], [20, 21, 22]),  # one more
        ([14, 15, 16, 17, 18, 99, 97], [21, 22, 98]),  # two others
        ([14, 15, 16, 17, 18, 99, 97, 96], []),
    ],
)
def test_a_copy_goes_on_behind_what_was_edited(came, expected):
    states = RequestStates(1, 64)
    proposer = proposer_of(states)
    head = [*COPIED, 98, 11, 12, 13]
    assert proposed(states, proposer, 0, head) == [14, 15, 16]
    for count in range(1, len(came)):
        proposed(states, proposer, 0, [*head, *came[:count]])
    assert proposed(states, proposer, 0, [*head, *came]) == expected


def test_what_is_copied_counts_more_than_what_was_said_last():
    states = RequestStates(1, 64)
    proposer = proposer_of(states)
    text = [1, 2, 3, 4, 5, 6, 70, 71, 3, 4, 5, 6, 80, 81, 1, 2, 3]
    assert proposed(states, proposer, 0, text) == [4, 5, 6]
    assert proposed(states, proposer, 0, [*text, 4, 5, 6]) == [70, 71, 3]
    proposer.begin(new_request(0, []))
    assert proposed(states, proposer, 0, [*text, 4, 5, 6]) == [80, 81, 1]


def test_what_was_copied_long_ago_is_forgotten():
    states = RequestStates(1, 128)
    proposer = proposer_of(states)
    head = [*COPIED, *range(30, 60), 11, 12, 13]
    assert proposed(states, proposer, 0, head) == [14, 15, 16]
    text = [*head, *range(70, 70 + ngram.REMEMBERED), 30]
    assert proposed(states, proposer, 0, text) == []


def test_another_request_and_other_tokens_begin_anew():
    states = RequestStates(1, 32)
    proposer = proposer_of(states)
    assert proposed(states, proposer, 0, [1, 2, 7, 8, 9, 1, 2]) == [7, 8, 9]
    proposer.replace(0, 7)
    assert proposed(states, proposer, 0, [1, 2, 7, 8, 9, 1, 2, 7]) == [8, 9, 1]
    proposer.replace(0, 2)
    assert proposed(states, proposer, 0, [1, 2, 5, 1, 2]) == [5, 1, 2]
    proposer.end(0)
    proposer.begin(new_request(0, [1, 2]))
    assert proposed(states, proposer, 0, [1, 2]) == []


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3), (2, 33), (-1, -1)])
def test_lengths_that_cannot_be_looked_for_are_refused(least, most):
    with pytest.raises(ConfigError, match="1 <= prompt_lookup_min <= prompt_lookup_max <= 32"):
        proposer_of(RequestStates(1, 8), prompt_lookup_min=least, prompt_lookup_max=most)


def test_many_slots_propose_what_each_does_alone():
    rng = np.random.default_rng(0)
    num_slots = 3 * ngram.FEW
    together, alone = RequestStates(num_slots, 64), RequestStates(num_slots, 64)
    both, each = proposer_of(together, 5), proposer_of(alone, 5)
    texts = [rng.integers(0, 4, 60).tolist() if slot else list(range(60)) for slot in range(num_slots)]
    slots = rng.permutation(num_slots).astype(np.int32)
    for _ in range(8):
        for slot in range(num_slots):
            count = min(int(together.num_tokens[slot]) + int(rng.integers(1, 8)), 60)
            fill(together, slot, texts[slot][:count])
            fill(alone, slot, texts[slot][:count])
        found = both.propose(slots)
        expected = [each.propose(slots[row : row + 1])[0] for row in range(num_slots)]
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert any(map(len, found)) and not all(map(len, found))
