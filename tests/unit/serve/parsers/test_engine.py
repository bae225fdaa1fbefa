"""The corpus of `canitoolcall`: what models write and what it means, in nine families, however the text is cut.

Every fixture has to be parsed exactly as it says. A call that was cut off counts as none: its deltas never say that it
is complete, and the message ends for another reason than `tool_calls`.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from canitoolcall.fixtures import Fixture

from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.engine import make_parser
from pagemill.serve.parsers.interface import MessageForm, MessageParser
from tests.fakes.messages import cut, parse
from tests.fakes.tool_fixtures import BELIEVED_WRONG, FIXTURES, check, form_of, settings_of

pytestmark = pytest.mark.cases(one_in=12)

NUM_RANDOM = 50


def parser_of(fixture: Fixture) -> MessageParser:
    parser = MessageParsers(settings_of(fixture)).make(form_of(fixture))
    assert parser is not None
    return parser


def pieces_of(text: str, rng: random.Random) -> list[str]:
    return cut(text, [rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12))])


def test_all_fixtures_are_there() -> None:
    families = {fixture.family for fixture in FIXTURES}
    assert len(FIXTURES) == 469
    assert len(families) == 9
    assert set(BELIEVED_WRONG) <= {fixture.id for fixture in FIXTURES}


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_a_fixture_means_what_it_says_however_it_is_cut(fixture: Fixture) -> None:
    text = fixture.raw_output
    whole = parse(parser_of(fixture), [text])
    check(fixture, whole)
    assert parse(parser_of(fixture), list(text)) == whole
    rng = random.Random(fixture.id)
    for _ in range(NUM_RANDOM):
        pieces = pieces_of(text, rng)
        assert parse(parser_of(fixture), pieces) == whole, pieces


@pytest.mark.slow
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_a_fixture_means_the_same_cut_in_two_anywhere(fixture: Fixture) -> None:
    text = fixture.raw_output
    whole = parse(parser_of(fixture), [text])
    for place in range(1, len(text)):
        assert parse(parser_of(fixture), [text[:place], text[place:]]) == whole, place


def hostile_texts(markers: Sequence[str]) -> list[str]:
    """Texts that make a careless parser look at the same characters again and again."""
    texts = [marker * 40 for marker in markers] + [marker[:-1] * 40 for marker in markers]
    texts += [f"{marker}{' ' * 2000}" for marker in markers]
    texts += ["".join(markers) * 10, "{" * 500, "[" * 500, '{"a": "' * 200, "<" * 500, "\n" * 2000]
    texts += [markers[0] + '{"name": "f", "arguments": {"a": "' + "\\" * 999, markers[0] + "f(" * 300]
    return texts


@pytest.mark.parametrize("name", sorted(set(TOOL_PARSERS)))
def test_what_is_held_back_is_bounded(name: str) -> None:
    """So time is linear in the text: each piece is looked at with what is held back, and no more."""
    calls = TOOL_PARSERS.resolve(name)
    reasoning = REASONING_PARSERS.resolve("qwen3")
    form = MessageForm(tools=[{"type": "function", "function": {"name": "f"}}])
    for text in hostile_texts(sorted(ParserSettings(None, name).markers) or ["[f(", '{"name": "f"']):
        parser: Any = make_parser(reasoning, calls, form)
        for char in text:
            parser.feed(char, ())
            assert len(parser._held) <= 1200, text[:80]
        parser.finish()
