"""Which parsers a server has, and which of them a message needs."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.format import Calls, Head, NamedCall
from pagemill.serve.parsers.interface import Delta, MessageForm, ToolCallDelta, merged
from tests.fakes.messages import Call, Message, cut, parse

TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXT = '<think>Why?</think>Well. <tool_call>{"name": "f", "arguments": {}}</tool_call>'

BOTH = ParserSettings("qwen3", "hermes")


class ChannelParser:
    """A format that is told apart by tokens: 1 begins reasoning, 2 begins content. Implements `MessageParser`."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, form: MessageForm) -> None:
        self._reasons = False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        if 1 in token_ids or 2 in token_ids:
            self._reasons = 1 in token_ids
        return [Delta(reasoning=text) if self._reasons else Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def test_settings_follow_the_flags() -> None:
    assert ParserSettings.of(ServerConfig()) == ParserSettings()
    flags = {"reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    settings = ParserSettings.of(ServerConfig(**flags, exclude_tools_when_tool_choice_none=True))
    assert settings == ParserSettings("qwen3", "hermes", True, "hermes")
    assert settings.markers == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert ParserSettings.of(ServerConfig(tool_call_parser="hermes")).tool_calls is None


@pytest.mark.parametrize(("flags", "message"), [
    ({"reasoning_parser": "x"}, "unknown reasoning parser 'x'; known: .*qwen3"),
    ({"tool_call_parser": "x"}, "unknown tool call parser 'x'; known: .*hermes"),
    ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice needs --tool-call-parser"),
])  # fmt: skip
def test_flags_that_cannot_work_are_found_at_start(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParserSettings.of(ServerConfig(**flags))


def test_a_message_gets_the_parsers_that_it_needs() -> None:
    both = MessageParsers(ParserSettings("qwen3", "hermes"))
    reasoning, _, after = TEXT.removeprefix("<think>").partition("</think>")
    called = both.make(MessageForm(tools=TOOLS))
    assert called is not None
    assert parse(called, [TEXT]) == Message("Well.", reasoning, [Call("f", "{}", True)])
    plain = both.make(MessageForm())
    assert plain is not None
    assert parse(plain, [TEXT]) == Message(after, reasoning)
    hidden = both.make(MessageForm(tools=TOOLS, include_reasoning=False))
    assert hidden is not None
    assert parse(hidden, list(TEXT)) == Message("Well.", "", [Call("f", "{}", True)])
    assert both.make(None) is None
    assert MessageParsers(ParserSettings(None, "hermes")).make(MessageForm()) is None


def test_what_is_held_back_goes_through_all_of_them() -> None:
    chain = MessageParsers(BOTH).make(MessageForm(prompt_end="<think>\n\n</think>", tools=TOOLS))
    assert chain is not None
    assert parse(chain, ["Yes <tool_c"]) == Message("Yes <tool_c")


def test_formats_and_classes_go_together() -> None:
    REASONING_PARSERS.add("channels", f"{__name__}:ChannelParser")
    try:
        parser = MessageParsers(ParserSettings("channels", "hermes")).make(MessageForm(tools=TOOLS))
        assert parser is not None
        call = TEXT.partition("Well. ")[2]
        deltas = parser.feed("Hm", [1]) + parser.feed(call, [2]) + parser.finish()
        assert merged(deltas) == [Delta(reasoning="Hm"), Delta(tool_call=ToolCallDelta(0, "f", "{}", True))]
    finally:
        REASONING_PARSERS.remove("channels")


FOO = Calls(
    models="Foo",
    form=(NamedCall(Head("", ("<json>",))),),
    begin=("<call>",),
    end=("</call>",),
    between=("</json>",),
)
"""The example of docs/how-to/add-a-parser.md: nothing but a name begins a call."""


def test_marks_after_a_call_are_no_call_however_they_are_cut() -> None:
    text = 'I look.<call>f<json>{}</json>f<json>{"a": 1}</json></call>'
    TOOL_PARSERS.add("foo", f"{__name__}:FOO")
    try:
        parsers = MessageParsers(ParserSettings(None, "foo"))
        for place in range(len(text)):
            parser = parsers.make(MessageForm(tools=TOOLS))
            assert parser is not None
            calls = [Call("f", "{}", True), Call("f", '{"a": 1}', True)]
            assert parse(parser, cut(text, [place])) == Message("I look.", "", calls), place
    finally:
        TOOL_PARSERS.remove("foo")


def test_calls_in_reasoning_are_reasoning() -> None:
    chain = MessageParsers(BOTH).make(MessageForm(tools=TOOLS))
    assert chain is not None
    assert parse(chain, [f"<think>{TEXT[19:]}</think>Yes"]) == Message("Yes", TEXT[19:].strip())


def test_a_parser_is_a_class_and_a_line() -> None:
    """Also one that does both, which is in both tables and reads tokens."""
    for table in (REASONING_PARSERS, TOOL_PARSERS):
        table.add("channels", f"{__name__}:ChannelParser")
    try:
        settings = ParserSettings.of(
            ServerConfig(reasoning_parser="channels", tool_call_parser="channels", enable_auto_tool_choice=True)
        )
        parser = MessageParsers(settings).make(MessageForm(tools=TOOLS))
        assert parser is not None
        deltas = parser.feed("Hm", [1, 7]) + parser.feed(" so", [8]) + parser.feed("Yes", [2, 9]) + parser.finish()
        assert merged(deltas) == [Delta(reasoning="Hm so"), Delta(content="Yes")]
    finally:
        for table in (REASONING_PARSERS, TOOL_PARSERS):
            table.remove("channels")


def test_deltas_are_merged_where_they_say_the_same_kind_of_thing() -> None:
    def call(number: int, name: str | None = None, arguments: str = "", complete: bool = False) -> Delta:
        return Delta(tool_call=ToolCallDelta(number, name, arguments, complete))

    deltas = [Delta("a"), Delta("b"), Delta(reasoning="c"), call(0, "f"), call(0, None, "{"), call(0, None, "}", True)]
    assert merged([*deltas, call(1, "g")]) == [
        Delta("ab"), Delta(reasoning="c"), call(0, "f", "{}", True), call(1, "g"),
    ]  # fmt: skip
