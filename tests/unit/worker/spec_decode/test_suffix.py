"""What most often followed is proposed, of the request's own text and of past outputs with the same salt only."""

import numpy as np
import pytest

from pagemill.errors import ConfigError
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode import suffix
from pagemill.worker.spec_decode.index_reference import PythonTokenTrie
from pagemill.worker.spec_decode.interface import ProposerContext, Speculation
from pagemill.worker.spec_decode.suffix import OwnText, PastOutputs, SuffixProposer
from tests.fakes.drafts import fill, new_request

WORDS = list(range(50, 70))


@pytest.fixture(params=["compiled", "python"], autouse=True)
def trie(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(suffix, "token_trie", PythonTokenTrie)


def proposer_of(states, max_drafts=4, **settings):
    named = {f"suffix_decoding_{name}": value for name, value in settings.items()}
    return SuffixProposer(ProposerContext(states, max_drafts, Speculation("suffix", max_drafts, **named)))


def proposed(states, proposer, slot, tokens, num_prompt_tokens=None):
    fill(states, slot, tokens, num_prompt_tokens)
    [found] = proposer.propose(np.array([slot], np.int32))
    return found.tolist()


def run(states, proposer, slot, prompt, output, salt=None):
    """A request from its begin to its end."""
    proposer.begin(new_request(slot, prompt, salt))
    fill(states, slot, [*prompt, *output], len(prompt))
    proposer.end(slot)
    proposer.end(slot)


def test_what_follows_most_often_is_proposed():
    states = RequestStates(1, 64)
    proposer = proposer_of(states)
    assert proposed(states, proposer, 0, [1, 2, 7, 1, 2, 7, 1, 2, 8, 9, 1, 2]) == [7, 1]  # two match, so two at most
    assert proposed(states, proposer_of(states, max_spec_factor=2.0), 0, [1, 2, 7, 8, 9, 1, 2]) == [7, 8, 9, 1]
    assert proposed(states, proposer_of(states, min_token_prob=0.7), 0, [1, 7, 1, 8, 1]) == []
    assert proposed(states, proposer_of(states, min_token_prob=0.3), 0, [1, 7, 1, 8, 1]) == [8]


def test_past_outputs_are_known_to_requests_of_the_same_salt_only():
    states = RequestStates(4, 64)
    proposer = proposer_of(states)
    run(states, proposer, 0, [1, 2, 3], WORDS, "mine")
    for slot, salt in [(1, "mine"), (2, "yours"), (3, None)]:
        proposer.begin(new_request(slot, [9], salt))
        found = proposed(states, proposer, slot, [9, *WORDS[:4]], 1)
        assert found == (WORDS[4:8] if salt == "mine" else [])
    proposer.begin(new_request(0, [1], "mine"))
    assert proposed(states, proposer, 0, [1, 2], 2) == []  # prompts are not remembered


def test_no_past_output_is_remembered_where_none_may_be():
    states = RequestStates(1, 64)
    proposer = proposer_of(states, max_cached_requests=0)
    run(states, proposer, 0, [1], WORDS)
    proposer.begin(new_request(0, [9]))
    assert proposed(states, proposer, 0, [9, *WORDS[:4]], 1) == []


def test_tokens_that_are_replaced_are_forgotten():
    states = RequestStates(1, 64)
    proposer = proposer_of(states)
    assert proposed(states, proposer, 0, [1, 2, 7, 8, 1, 2]) == [7, 8]
    proposer.replace(0, 6)
    assert proposed(states, proposer, 0, [1, 2, 7, 8, 1, 2, 7]) == [8, 1, 2]
    proposer.replace(0, 2)
    assert proposed(states, proposer, 0, [1, 2, 5, 6, 1, 2]) == [5, 6]


@pytest.mark.parametrize("num_outputs", [1, 2, 4])
def test_the_oldest_outputs_are_forgotten_first(num_outputs):
    past = PastOutputs(8, num_outputs, 10_000, 10_000)
    for number in range(9):
        past.add(None, np.arange(10 * number, 10 * number + 10, dtype=np.int32))
        assert past.num_outputs <= max(1, num_outputs)
        found, _ = past.propose(None, np.array([10 * number], np.int32), 5, 4.0, 0.1)
        assert found.tolist() == list(range(10 * number + 1, 10 * number + 5))
    assert past.propose(None, np.array([0], np.int32), 5, 4.0, 0.1)[0].tolist() == []


@pytest.mark.parametrize(("max_nodes", "max_tokens"), [(60, 10_000), (10_000, 20)])
def test_outputs_that_are_longer_than_the_memory_leave_their_end(max_nodes, max_tokens):
    past = PastOutputs(8, 100, max_nodes, max_tokens)
    past.add(None, np.arange(500, dtype=np.int32))
    found, _ = past.propose(None, np.array([495], np.int32), 3, 4.0, 0.1)
    assert found.tolist() == [496, 497, 498]
    assert past.propose(None, np.array([5], np.int32), 3, 4.0, 0.1)[0].tolist() == []


def test_a_text_with_more_strings_than_there_is_room_for_keeps_its_end():
    text = np.random.default_rng(0).integers(0, 3, 200).astype(np.int32)
    own = OwnText(text, 24, 120)
    for count in (50, 100, 200):
        own.extend(count)
        assert own.num_tokens == count
        assert 0 < own.trie.num_tokens < max(count, 51)
        assert len(own.trie.counts()) < 120


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tree_depth", 1),
        ("max_tree_depth", 65),
        ("max_cached_requests", -1),
        ("max_spec_factor", float("nan")),
        ("min_token_prob", 1.5),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"suffix_decoding_{name} .*allowed"):
        proposer_of(RequestStates(1, 8), **{name: value})
