"""The compiled indexes know what the ones in Python know, and both what a search through the text finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.worker.spec_decode.index_reference import PythonNgramIndex, PythonTokenTrie
from pagemill.worker.spec_decode.token_index import NgramIndex, TokenTrie, follow_all, ngram_index, token_trie
from tests.examples import examples

TOKENS = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 2**31 - 1), max_size=60),
    st.integers(0, 6).flatmap(lambda size: st.just(list(range(size)) * 9)),
)
PARTS = st.lists(st.integers(1, 9), max_size=9)
KINDS = [
    pytest.param((NgramIndex, TokenTrie), id="compiled"),
    pytest.param((PythonNgramIndex, PythonTokenTrie), id="python"),
]
DEPTH = 6


def steps(tokens, parts):
    """Counts at which a text stands as it grows."""
    counts = np.cumsum([0, *parts])
    return [*counts[counts < len(tokens)].tolist(), len(tokens)]


def searched(tokens, shortest, longest):
    """Where the longest of the last tokens was seen last, by a search."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return end
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(tokens=TOKENS, parts=PARTS, shortest=st.integers(1, 3), more=st.integers(0, 3))
def test_the_longest_and_latest_match_is_found(kind, tokens, parts, shortest, more):
    text = np.array([*tokens, 7, 7], np.int32)
    index = kind[0](shortest, shortest + more)
    index.restart(text)
    for count in steps(tokens, parts):
        index.extend(count)
        assert index.num_tokens == count
        assert index.find() == searched(tokens[:count], shortest, shortest + more)


@settings(max_examples=examples(60), deadline=None)
@given(tokens=TOKENS.filter(lambda tokens: len(tokens) > 1), data=st.data())
def test_both_kinds_follow_the_same_copy(tokens, data):
    text = np.array(tokens, np.int32)
    copied = data.draw(st.integers(0, len(tokens) - 1))
    found = []
    for kind, _ in (kind.values[0] for kind in KINDS):
        index = kind(2, 4)
        index.restart(text)
        index.extend(len(tokens))
        found.append(index.find(copied))
    assert found[0] == found[1]
    assert 0 <= found[0] < len(tokens)


@settings(max_examples=examples(40), deadline=None)
@given(tokens=st.lists(TOKENS, max_size=4), parts=PARTS, data=st.data())
def test_several_are_asked_together(tokens, parts, data):
    """Compiled ones, others, and both."""
    texts = [np.array([*text, 7], np.int32) for text in tokens] * 3
    alone, *groups = ([kind(1, 3) for _ in texts] for kind in (NgramIndex, NgramIndex, PythonNgramIndex))
    groups.append([(NgramIndex, PythonNgramIndex)[place % 2](1, 3) for place in range(len(texts))])
    for indexes in (alone, *groups):
        for index, text in zip(indexes, texts, strict=True):
            index.restart(text)
    for count in steps(range(60), parts):
        counts = [min(count, len(text) - 1) for text in texts]
        copied = [data.draw(st.integers(0, max(count - 1, 0))) for count in counts]
        expected = []
        for index, known, place in zip(alone, counts, copied, strict=True):
            index.extend(known)
            expected.append(index.find(place))
        for indexes in groups:
            assert follow_all(indexes, counts, copied) == expected
            assert [index.num_tokens for index in indexes] == counts


def occurrences(tokens, string):
    """Where the string goes on, wherever it is."""
    size = len(string)
    return [end for end in range(size, len(tokens) + 1) if tuple(tokens[end - size : end]) == tuple(string)]


def expected_guess(tokens, match, most, factor, least):
    """What a trie should say of the last `match` tokens of its own text, by a search; None where they are new."""
    string = tokens[len(tokens) - match :]
    total = len(occurrences(tokens, string)) - 1
    if total == 0:
        return None
    draft = []
    chance = 1.0
    score = 0.0
    while len(draft) < min(most, int(match * factor), DEPTH - match):
        ends = [end for end in occurrences(tokens, [*string, *draft]) if end < len(tokens)]
        if not ends:
            break
        follows = [tokens[end] for end in ends]
        token = max(set(follows), key=lambda one: (follows.count(one), max(e for e in ends if tokens[e] == one)))
        chance *= follows.count(token) / total
        if chance < least:
            break
        total = follows.count(token)
        score += chance
        draft.append(token)
    return draft, score


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=TOKENS,
    parts=PARTS,
    most=st.integers(1, 5),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    least=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_a_trie_counts_what_is_in_the_text(kind, tokens, parts, most, factor, least):
    text = np.array([*tokens, 7, 7], np.int32)
    trie = kind[1](DEPTH, 100_000)
    trie.restart(text)
    root = trie.add_root()
    for count in steps(tokens, parts):
        assert trie.extend(root, count) == count == trie.num_tokens
        last = text[max(0, count - DEPTH) : count]
        found, score = trie.propose(root, last, most, factor, least, True)
        guesses = []
        for match in range(1, min(count, DEPTH - 1) + 1):
            guess = expected_guess(tokens[:count], match, most, factor, least)
            if guess is None:
                break
            guesses.append(guess)
        best = max(enumerate(guesses), key=lambda one: (bool(one[1][0]), one[1][1], one[0]), default=(0, ([], 0.0)))
        assert (found.tolist(), score) == (best[1][0], pytest.approx(best[1][1]))
        # A leaf stands for all that follows it, so its count is that of a string seen once: longer ones have no node.
        for (_, *string), times in trie.counts().items():
            assert times == len(occurrences(tokens[:count], string))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    texts=st.lists(TOKENS, min_size=1, max_size=4),
    pattern=TOKENS,
    max_nodes=st.sampled_from([40, 120, 100_000]),
)
def test_both_tries_know_the_same_of_many_texts(texts, pattern, max_nodes):
    text = np.array([token for one in texts for token in [*one, -1]], np.int32)
    tries = [kind(DEPTH, max_nodes) for kind in (TokenTrie, PythonTokenTrie)]
    last = np.array(pattern[-DEPTH:], np.int32)
    answers = []
    for trie in tries:
        trie.restart(text)
        roots = [trie.add_root(), trie.add_root()]
        reached = []
        count = 0
        for number, one in enumerate(texts):
            count += len(one) + 1
            reached.append(trie.extend(roots[number % 2], count))
        guesses = [trie.propose(root, last, 5, 2.0, 0.1, False) for root in roots]
        answers.append((reached, trie.counts(), trie.has_room, [(ids.tolist(), score) for ids, score in guesses]))
    assert answers[0] == answers[1]
    assert len(answers[0][1]) <= max_nodes


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_run_into_each_other_nor_into_other_roots(kind):
    trie = kind[1](DEPTH, 1000)
    text = np.array([1, 2, 3, -1, 4, 5, -1, 1, 2, 8, -1], np.int32)
    trie.restart(text)
    first, second = trie.add_root(), trie.add_root()
    trie.extend(first, 7)
    trie.extend(second, 11)

    def guess(root, *tokens):
        return trie.propose(root, np.array(tokens, np.int32), 5, 9.0, 0.0, False)[0].tolist()

    assert guess(first, 1, 2) == [3]  # the text ends there
    assert guess(second, 1, 2) == [8]
    assert guess(second, 4) == []
    assert guess(first, 3) == []


def test_there_are_compiled_indexes_where_the_kernels_compile(monkeypatch):
    assert isinstance(ngram_index(1, 2), NgramIndex)
    assert isinstance(token_trie(4, 100), TokenTrie)
    monkeypatch.setattr("pagemill.worker.spec_decode.token_index.library", lambda: None)
    assert isinstance(ngram_index(1, 2), PythonNgramIndex)
    assert isinstance(token_trie(4, 100), PythonTokenTrie)
