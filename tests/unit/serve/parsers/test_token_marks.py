"""Marks that are tokens, and text that spells them: the fixtures of `canitoolcall` as tokens of a stub tokenizer.

The real tokenizers are not here. The stub has the markers of a family as tokens of their own, and cuts other text into
short pieces. Where a fixture's real token ids say that a marker is text of other tokens, so it is for the stub.
"""

import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest
from canitoolcall.fixtures import Fixture

from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.format import Format
from pagemill.serve.parsers.interface import Delta, MessageForm, merged
from pagemill.serve.parsers.token_marks import TokenMarkParser, TokenMarks
from tests.fakes.fake_tokenizer import ByteTokenizer
from tests.fakes.messages import Message
from tests.fakes.tool_fixtures import FIXTURES, check, family_of, form_of, settings_of

pytestmark = pytest.mark.cases(one_in=12)

ORDINARY = 0
PIECE_CHARS = 3
CHARS_PER_TOKEN = 4
SPELLING_TAGS = {"marker-in-arguments", "x-marker-in-reasoning", "x-control-token-vs-text"}

Tokens = list[tuple[str, int]]


class MarkerTokenizer(ByteTokenizer):
    """The markers of a family are hidden tokens."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.ids = {marker: number for number, marker in enumerate(markers, 1)}

    def hides(self, text: str) -> bool:
        return text in self.ids

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        return [self.ids[text]] if text in self.ids else [ORDINARY] * len(text)


@functools.cache
def real_id(model: str, marker: str) -> int | None:
    """The id that a model's tokenizer has for a marker: the one that is there as often as the text, wherever the text
    is no text of other tokens. None when the fixtures do not say."""
    candidates: set[int] | None = None
    for fixture in FIXTURES:
        count = fixture.raw_output.count(marker)
        if fixture.models[0] != model or SPELLING_TAGS & set(fixture.tags) or not fixture.output_token_ids or not count:
            continue
        found = {token_id for token_id, times in Counter(fixture.output_token_ids).items() if times == count}
        candidates = found if candidates is None else candidates & found
    return candidates.pop() if candidates is not None and len(candidates) == 1 else None


def are_tokens(fixture: Fixture, markers: Sequence[str], found: Sequence[re.Match[str]]) -> list[bool]:
    """For each marker in the text, whether it is a token: the choice for which the number of tokens between those fits
    the number of characters best."""
    ids = {real_id(fixture.models[0], marker): marker for marker in markers}
    known = {marker for token_id, marker in ids.items() if token_id is not None}
    real: list[tuple[str, int]] = []
    gap = 0
    for token_id in fixture.output_token_ids or ():
        if token_id in ids:
            real.append((ids[token_id], gap))
            gap = 0
        else:
            gap += 1
    size = len(fixture.raw_output)

    @functools.cache
    def best(at: int, number: int, end: int) -> tuple[float, tuple[bool, ...]]:
        """For the markers from `at` on, where `number` tokens are placed and the last of them ends at `end`."""
        if at == len(found):
            cost = misfit(size - end, gap) if number == len(real) else math.inf
            return cost, ()
        match = found[at]
        if match.group() not in known:
            cost, flags = best(at + 1, number, end)
            return cost, (True, *flags)
        cost, flags = best(at + 1, number, end)
        choices = [(cost, (False, *flags))]
        if number < len(real) and real[number][0] == match.group():
            cost, flags = best(at + 1, number + 1, match.end())
            choices.append((cost + misfit(match.start() - end, real[number][1]), (True, *flags)))
        return min(choices)

    cost, flags = best(0, 0, 0)
    assert cost < math.inf
    return list(flags)


def misfit(num_chars: int, num_tokens: int) -> float:
    """How badly a number of characters fits a number of tokens."""
    if (num_chars == 0) != (num_tokens == 0):
        return math.inf
    return abs(num_chars - CHARS_PER_TOKEN * num_tokens)


def tokens_of(fixture: Fixture, tokenizer: MarkerTokenizer, exact: frozenset[str]) -> Tokens:
    text = fixture.raw_output
    found = list(re.finditer("|".join(map(re.escape, sorted(tokenizer.ids, key=len, reverse=True))), text))
    flags = iter(are_tokens(fixture, sorted(exact), [match for match in found if match.group() in exact]))
    tokens: Tokens = []
    at = 0
    for match in found:
        if match.group() not in exact or next(flags):
            tokens += [(piece, ORDINARY) for piece in pieces_of(text[at : match.start()])]
            tokens.append((match.group(), tokenizer.ids[match.group()]))
            at = match.end()
    return tokens + [(piece, ORDINARY) for piece in pieces_of(text[at:])]


def pieces_of(text: str) -> list[str]:
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]


def exact_marks(settings: ParserSettings) -> frozenset[str]:
    kinds = [TOOL_PARSERS.resolve(settings.tool_calls or "")]
    if settings.reasoning is not None:
        kinds.append(REASONING_PARSERS.resolve(settings.reasoning))
    return frozenset(text for kind in kinds if isinstance(kind, Format) for text in kind.tokens)


def parsed(parsers: MessageParsers, form: MessageForm, tokens: Tokens, cuts: Sequence[int]) -> Message:
    parser = parsers.make(form)
    assert parser is not None
    message = Message()
    bounds = [0, *cuts, len(tokens)]
    for begin, end in itertools.pairwise(bounds):
        group = tokens[begin:end]
        for delta in parser.feed("".join(text for text, _ in group), [token_id for _, token_id in group]):
            message.add(delta)
    for delta in parser.finish():
        message.add(delta)
    return message


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_a_fixture_means_what_it_says_as_tokens(fixture: Fixture) -> None:
    settings = settings_of(fixture)
    exact = exact_marks(settings)
    tokenizer = MarkerTokenizer(sorted({*family_of(fixture.family).markers, *exact}))
    tokens = tokens_of(fixture, tokenizer, exact)
    parsers = MessageParsers(settings, tokenizer)
    form = form_of(fixture)
    one_by_one = parsed(parsers, form, tokens, range(1, len(tokens)))
    check(fixture, one_by_one)
    assert parsed(parsers, form, tokens, ()) == one_by_one
    rng = random.Random(fixture.id)
    for _ in range(10):
        cuts = sorted(rng.randrange(len(tokens) + 1) for _ in range(rng.randrange(1, 9)))
        assert parsed(parsers, form, tokens, cuts) == one_by_one, cuts


def test_spelled_markers_are_there() -> None:
    """The fixtures have some, so that the test above means something."""
    spelled = 0
    for fixture in FIXTURES:
        exact = exact_marks(settings_of(fixture))
        if exact:
            found = list(re.finditer("|".join(map(re.escape, sorted(exact))), fixture.raw_output))
            spelled += not all(are_tokens(fixture, sorted(exact), found))
    assert spelled >= 4


class Recorder:
    """Implements `MessageParser`: what it is fed is content."""

    def __init__(self) -> None:
        self.fed: list[str] = []

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        self.fed.append(text)
        return [Delta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def test_a_mark_is_broken_where_no_token_stands_for_it() -> None:
    recorder = Recorder()
    parser = TokenMarkParser(recorder, TokenMarks({"<|a|>": 7}))
    deltas: list[Delta] = []
    for text, ids in [("x<|", [1]), ("a|>y", [2]), ("", [7]), ("<|a|>", [3]), ("<|a|>z", [7, 4]), ("<|a|>", [5])]:
        deltas += parser.feed(text, ids)
    assert merged(deltas + parser.finish()) == [Delta("x<|a|>y<|a|><|a|>z<|a|>")]
    seen = "".join(recorder.fed)
    assert seen.count("<|a|>") == 2
    assert seen.index("<|a|>") == seen.index("y") + 1
