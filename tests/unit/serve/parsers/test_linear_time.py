"""Time is linear in a text that somebody made to be slow: a megabyte of it costs a few times what a quarter costs."""

import time
from collections.abc import Sequence

import pytest

from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.parsers.response_template import HF, formats_of
from tests.fakes.response_templates import EXAMPLES

pytestmark = pytest.mark.cases(one_in=48)

LARGE = 1_000_000
SMALL = LARGE // 4
MOST_TIMES = 10
"""Linear time is 4 times as much, quadratic time 16 times."""
ROUNDS = 6
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
ARGUMENTS = '{"name": "f", "arguments": {"a": '


def one_of_each(names: Sequence[str], table: object) -> list[str]:
    """Names of formats that differ."""
    found = {id(table.resolve(name)): name for name in names}  # type: ignore[attr-defined]
    return sorted(found.values())


def texts_of(settings: ParserSettings) -> list[tuple[str, str]]:
    """Beginnings of texts, and what follows them again and again."""
    marks = sorted(settings.markers) or ["["]
    begin = "".join(marks[:1])
    return [
        ("", "".join(marks)),
        ("", begin + ARGUMENTS + "1}} "),
        ("", "".join(mark[:-1] for mark in marks) + " "),
        (begin + ARGUMENTS, "[{"),
        (begin + ARGUMENTS + '"', '\\"<'),
        (begin + "f(a='", "\\'"),
    ]


def seconds(settings: ParserSettings, begin: str, unit: str, size: int) -> float:
    """Processor time of this thread for the whole text at once."""
    text = (begin + unit * (size // len(unit) + 1))[:size]
    parser = MessageParsers(settings).make(MessageForm(tools=TOOLS))
    assert parser is not None
    start = time.thread_time()
    parser.feed(text, ())
    parser.finish()
    return time.thread_time() - start


def check(settings: ParserSettings) -> None:
    for begin, unit in texts_of(settings):
        large = seconds(settings, begin, unit, LARGE)
        small = seconds(settings, begin, unit, SMALL)
        for _ in range(ROUNDS):
            if large <= small * MOST_TIMES or large < 0.05:
                break
            # Other work on the machine may have made one of them slow: the least of several times counts.
            large = min(large, seconds(settings, begin, unit, LARGE))
            small = min(small, seconds(settings, begin, unit, SMALL))
        else:
            pytest.fail(f"{begin!r}, then {unit!r}: {small:.3f} s for {SMALL} characters, {large:.3f} s for {LARGE}")


@pytest.mark.parametrize("name", one_of_each(sorted(TOOL_PARSERS), TOOL_PARSERS))
def test_of_tool_calls(name: str) -> None:
    check(ParserSettings("qwen3" if name != "openai" else None, name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_of_response_templates(name: str) -> None:
    template = formats_of(EXAMPLES[name].template)
    check(ParserSettings(HF if template.reasoning is not None else None, HF, template=template))


@pytest.mark.parametrize("name", one_of_each(sorted(REASONING_PARSERS), REASONING_PARSERS))
def test_of_reasoning(name: str) -> None:
    check(ParserSettings(name))
