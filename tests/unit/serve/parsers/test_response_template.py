"""Response templates as formats: messages are read as transformers' own parser reads them, however they are cut."""

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from pagemill.errors import ConfigError
from pagemill.serve.parsers.call_spec import Function
from pagemill.serve.parsers.call_writer import CallWriter
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.format import Calls, JsonCall, NotationCall
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.parsers.response_template import HF, formats_of
from tests.fakes.fake_tokenizer import ByteTokenizer
from tests.fakes.messages import Message, cut, parse
from tests.fakes.response_templates import BLOCKS, EXAMPLES, HARMONY, SMOLLM, Example

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
THOUGHT = "Look <b>at</b> it: é\n\nagain"
TEXT = 'I say "é😀" {} <x'
Values = tuple[str, str, list[tuple[str, Any]]]


def settings_of(example: Example) -> ParserSettings:
    return ParserSettings(HF, HF, template=formats_of(example.template))


def messages_of(example: Example) -> list[tuple[str, str]]:
    """Ends of prompts and the messages after them."""
    begin, end = example.thought
    text = example.text[0] + TEXT + example.text[1]
    reads_all = example.template["fields"].get("thinking", {}).get("open_pattern")
    found = [] if reads_all else [("", text), ("", example.calls)]
    if end:
        found += [("", begin + THOUGHT + end + rest) for rest in (text, example.calls, text + example.calls)]
        found += [(begin, THOUGHT + end + text), (begin, THOUGHT)]
    else:
        found.append(("", text + example.calls))
    return found


def ours(example: Example, prompt: str, pieces: list[str]) -> Message:
    parser = MessageParsers(settings_of(example)).make(MessageForm(prompt_end=prompt, tools=TOOLS))
    assert parser is not None
    return parse(parser, pieces)


def values(message: Message) -> Values:
    assert all(call.complete for call in message.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    return message.content.strip(), message.reasoning, calls


def theirs(example: Example, prompt: str, text: str) -> Values:
    """What transformers makes of it."""
    anchor = example.template.get("start_anchor", "<|turn|>m")
    anchor = anchor if isinstance(anchor, str) else anchor[0]
    found = parse_response(text, example.template, prefix=anchor + prompt, tools=TOOLS)
    reasoning = next((found[name] for name in ("reasoning_content", "reasoning", "thinking") if name in found), "")
    functions = [call["function"] for call in found.get("tool_calls", [])]
    return found.get("content", ""), reasoning, [(call["name"], call["arguments"]) for call in functions]


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_are_read_as_transformers_reads_them(name: str) -> None:
    example = EXAMPLES[name]
    for prompt, text in messages_of(example):
        whole = ours(example, prompt, [text])
        assert values(whole) == theirs(example, prompt, text), (prompt, text)
        assert ours(example, prompt, list(text)) == whole
        for place in range(1, len(text)):
            assert ours(example, prompt, cut(text, [place])) == whole, (prompt, text[:place])


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_can_be_held_to_the_format(name: str) -> None:
    calls = formats_of(EXAMPLES[name].template).calls
    assert calls is not None
    writer = CallWriter(calls, lambda text: None)
    assert writer.can_name("get_weather")
    functions = [Function("get_weather", CITY)]
    assert writer.whole(functions, several=True)
    assert writer.triggered(functions, several=True).triggers


def test_a_mark_in_an_argument_is_text() -> None:
    """Where transformers' parser ends the call in the middle."""
    text = '<tool_call>{"name": "get_time", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert values(ours(EXAMPLES["smollm"], "", [text])) == ("", "", [("get_time", {"a": "</tool_call>"})])


def test_white_space_between_calls_does_not_undo_the_content() -> None:
    """As it does where transformers reads it by a template that says nothing of it."""
    example = EXAMPLES["smollm"]
    text = f"Hi{example.calls}\n{example.calls}"
    assert theirs(example, "", text)[0] == ""
    assert ours(example, "", [text]).content == "Hi"


def test_white_space_is_kept_where_the_template_keeps_it() -> None:
    template = copy.deepcopy(SMOLLM)
    template["fields"]["thinking"]["content_args"] = {"strip": False}
    template["fields"]["content"]["content_args"] = {"strip": False}
    example = Example(template, "", ("<think>", "</think>"))
    text = "<think> a \n</think> b \n"
    whole = ours(example, "", [text])
    assert (whole.reasoning, whole.content) == (" a \n", " b \n")
    assert theirs(example, "", text) == (" b \n", " a \n", [])


def test_forms_of_calls() -> None:
    calls = formats_of(EXAMPLES["cohere"].template).calls
    assert isinstance(calls, Calls)
    assert calls.form == (JsonCall(name="tool_name", arguments=("parameters",)),)
    assert calls.many
    gemma = formats_of(EXAMPLES["gemma4"].template).calls
    assert gemma is not None
    assert gemma.begin == ("<|tool_call>",)
    assert isinstance(gemma.form[0], NotationCall)
    assert gemma.form[0].head.start == "call:"


FIELD = {"open": "<c>", "close": "</c>", "content": "json", "transform": {"function": "{content}"}}
GROUP = r"<c>(?P<name>\w+)"
NOTATION = {"unquoted_keys": True, "string_delims": [["'", "'"]]}
NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}


def with_calls(**changes: Any) -> dict[str, Any]:
    return {"start_anchor": "a", "fields": {"tool_calls": FIELD | changes}}


def with_pattern(**changes: Any) -> dict[str, Any]:
    field = {name: value for name, value in FIELD.items() if name != "open"}
    return {
        "start_anchor": "a",
        "fields": {"tool_calls": field | {"open_pattern": GROUP, "transform": NAMED} | changes},
    }


def with_thinking(**changes: Any) -> dict[str, Any]:
    return {"start_anchor": "a", "fields": {"thinking": {"open": "<t>", "close": "</t>"} | changes}}


@pytest.mark.parametrize(("template", "message"), [
    ([], "response_template is a list, not an object"),
    ({"version": 2}, "version=2 is not supported"),
    ({"x": 1}, "response_template.x is not known"),
    ({"fields": {}}, "at least one field"),
    ({"fields": {"content": 1}}, "fields.content is a int"),
    ({"fields": {"content": {"x": 1}}}, "fields.content.x is not known"),
    ({"fields": {"citations": {"open": "x"}}}, "fields.citations is none of"),
    ({"fields": {"thinking": {}}}, "fields.thinking has no open"),
    ({"fields": {"thinking": {"open": "a"}, "reasoning": {"open": "b"}}}, "stands beside thinking"),
    (HARMONY, "begins with the mark of content, .*messages with headers"),
    (BLOCKS, "content.open_pattern cannot be read here: .*only white space"),
    (with_thinking(open=[]), "thinking.open must be a text, or a list"),
    (with_thinking(open=""), "thinking.open must be a text, or a list"),
    (with_thinking(open="x" * 2000), "more than 1024 characters"),
    (with_thinking(open=["<a>", "<b>"]), "thinking.open names several texts"),
    (with_thinking(open_pattern="<a>"), "thinking has both open and open_pattern"),
    (with_thinking(close=None), "thinking.close must be"),
    (with_thinking(repeats=True), "thinking.repeats is not supported"),
    (with_thinking(content="json"), "only 'text' is supported"),
    (with_thinking(transform="x"), "thinking.transform is not supported"),
    (with_thinking(content_args={"x": 1}), "content_args.x is not supported"),
    (with_thinking(content_args=[]), "content_args must be an object"),
    (with_calls(content="kv-lines"), "content is 'kv-lines'"),
    (with_calls(content="xml-inline"), "has no group"),
    (with_calls(content_args={"allow_non_json": True}), "content_args.allow_non_json is not supported"),
    (with_calls(transform=None), "transform must be an object"),
    (with_calls(transform={"function": "{x}"}), "transform.function must be"),
    (with_calls(transform={"function": {"name": 1, "arguments": "{content.a}"}}), "function.name is 1"),
    (with_calls(transform={"function": {"name": "{content.a.b}", "arguments": "{content.a}"}}), "function.name is"),
    (with_calls(transform=NAMED), "does not say which members"),
    (with_pattern(transform={"function": "{content}"}), "where open has the name"),
    (with_pattern(open_pattern=r"\w+"), "cannot be read here"),
    (with_pattern(open_pattern=r"(?P<name>\w+)"), "must begin with a fixed text"),
    (with_pattern(open_pattern=r"<c>(?P<x>\w+)"), "has no group"),
    (with_pattern(open_pattern=r"<c>(?P<name>\w+)a\s*b"), "more than one fixed text after the name"),
    (with_pattern(content_args={"unquoted_keys": True}), "needs unquoted_keys, and string_delims"),
    (with_pattern(open_pattern=r"<c>(?P<name>\w+)>", content_args=NOTATION),
     "must end with the name"),
    (with_pattern(content="xml-inline", content_args={"tag_pattern": "x"}), "is not a text, "),
    (with_pattern(content="xml-inline", content_args={"value_parser": {"name": "int"}}), "value_parser is"),
])  # fmt: skip
def test_what_formats_cannot_say_is_refused_with_the_reason(template: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        formats_of(template)


class Templated(ByteTokenizer):
    def __init__(self, template: Any) -> None:
        self.response_template = template


def test_hf_follows_the_template_of_the_model() -> None:
    asked = ParserSettings(HF, HF, forced_calls=HF)
    found = asked.for_model(Templated(SMOLLM))
    assert found.template == formats_of(SMOLLM)
    assert found.markers >= {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert found.for_model(ByteTokenizer()) is found
    assert found.calls_format(is_forced=True) == formats_of(SMOLLM).calls
    assert found.reasoning_before(MessageForm(prompt_end="<think>")) is not None


def test_hf_needs_a_template_that_can_be_followed() -> None:
    for template, message in (
        (None, "'hf' needs a response_template"),
        (HARMONY, "'hf' cannot follow the model's response_template.*headers"),
        (with_calls(), "--reasoning-parser hf: the model's response_template has no field of reasoning"),
    ):
        with pytest.raises(ConfigError, match=message):
            ParserSettings(HF).for_model(Templated(template))
    with pytest.raises(ConfigError, match=r"--tool-call-parser hf: .*has no field tool_calls"):
        ParserSettings(None, HF).for_model(Templated(with_thinking()))


def test_auto_prefers_the_template() -> None:
    found = ParserSettings("auto", "auto").for_model(Templated(SMOLLM))
    assert (found.reasoning, found.tool_calls) == (HF, HF)
    tokenizer = Templated(HARMONY)
    tokenizer.chat_template = "<tool_call> </think>"
    found = ParserSettings("auto", "auto").for_model(tokenizer)
    assert (found.reasoning, found.tool_calls, found.template) == ("qwen3", "hermes", None)
    only_calls = Templated(with_calls())
    only_calls.chat_template = "</think>"
    found = ParserSettings("auto", "auto").for_model(only_calls)
    assert (found.reasoning, found.tool_calls) == ("qwen3", HF)
