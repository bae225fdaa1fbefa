"""Where a repetition ends a completion, against a search that looks at all tokens anew."""

import random

import pytest

from pagemill.errors import RequestError
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.sampling_params import RepetitionDetectionParams, SamplingParams
from pagemill.serve.processing.detokenizer import NoText, StopMatch
from pagemill.serve.processing.repetition import RepetitionWatch


def ends_at(tokens, min_tokens=0, step=1, **fields):
    """Tokens up to the end; None when nothing ends them."""
    watch = RepetitionWatch(NoText(), RepetitionDetectionParams(**fields), min_tokens)
    for start in range(0, len(tokens), step):
        match = watch.append(tokens[start : start + step])
        if match is not None:
            assert match[::2] == ("repetition_detected", FinishReason.REPETITION)
            return start + match.num_tokens
    return None


def naive(tokens, max_pattern_size, min_count, min_pattern_size=0, min_tokens=0):
    for end in range(max(min_tokens, 1), len(tokens) + 1):
        for size in range(max(min_pattern_size, 1), max_pattern_size + 1):
            tail = tokens[max(end - size * min_count, 0) : end]
            if len(tail) == size * min_count and tail == tail[:size] * min_count:
                return end
    return None


def test_a_pattern_ends_with_its_last_repetition():
    tokens = [9, 8, *[1, 2, 3] * 4, 7]
    assert ends_at(tokens, max_pattern_size=3, min_count=3) == 11
    assert ends_at(tokens, max_pattern_size=8, min_count=4) == 14
    assert ends_at(tokens, max_pattern_size=2, min_count=2) is None
    assert ends_at(tokens, max_pattern_size=8, min_pattern_size=4, min_count=2) == 14  # two times two of them
    assert ends_at(tokens, max_pattern_size=3, min_count=5) is None
    assert ends_at(tokens, max_pattern_size=3, min_count=3, min_tokens=13) == 13


def test_as_a_search_through_all_tokens_finds_it():
    rng = random.Random(5)
    found = 0
    for _ in range(150):
        pattern = [rng.randrange(4) for _ in range(rng.randint(1, 9))]
        tokens = [rng.randrange(4) for _ in range(rng.randint(0, 30))] + pattern * rng.randint(1, 6)
        tokens = tokens[: len(tokens) - rng.randint(0, 3)] or [0]
        most = rng.randint(1, 12)
        fields = {"max_pattern_size": most, "min_pattern_size": rng.randint(0, most), "min_count": rng.randint(2, 5)}
        expected = naive(tokens, **fields, min_tokens=(least := rng.choice([0, 10])))
        assert ends_at(tokens, least, rng.choice([1, 3]), **fields) == expected
        found += expected is not None
    assert 20 < found < 140


def test_long_outputs():
    tokens = [*range(700), *[5, 6, 7] * 100]
    assert ends_at(tokens, max_pattern_size=64, min_count=90) == 700 + 270
    assert ends_at([*range(2000)], max_pattern_size=1024, min_count=2) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size=-1 is not allowed: an integer from 0 to 1024"),
        ({"max_pattern_size": 2000, "min_count": 2}, "max_pattern_size=2000"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count=1 is not allowed: an integer from 2"),
        ({"max_pattern_size": 4}, "min_count=0"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size=5 is not allowed"),
        ({"max_pattern_size": 4.0, "min_count": 2}, "max_pattern_size=4.0"),
        ({"size": 4}, "has 'size'; what it may have: max_pattern_size, min_pattern_size, min_count"),
        ([4], "repetition_detection is a list"),
    ],
)
def test_bad_values(value, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(repetition_detection=value)
    assert caught.value.field == "repetition_detection"


def test_nothing_is_looked_for():
    assert SamplingParams(repetition_detection={}).repetition_detection is None


def test_a_stop_string_in_the_last_bytes_keeps_the_tokens():
    class EndsWithStop(NoText):
        def finish(self):
            return StopMatch("\ufffd", 0)

    watch = RepetitionWatch(EndsWithStop(), RepetitionDetectionParams(max_pattern_size=1, min_count=3), 0)
    assert watch.append([5, 7, 7, 7, 8]) == StopMatch("\ufffd", 4, FinishReason.STOP)
