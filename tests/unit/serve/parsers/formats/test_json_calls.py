"""Tool calls as JSON: what is a call, what is content, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.serve.parsers.engine import make_parser
from pagemill.serve.parsers.formats.json_calls import HERMES
from pagemill.serve.parsers.interface import MessageForm
from tests.fakes.messages import Call, Message, cut, parse

FORM = MessageForm()


def hermes(*pieces: str, form: MessageForm = FORM) -> Message:
    return parse(make_parser(None, HERMES, form), pieces)


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("arguments", [
    "{}", '{"city": "Zürich", "days": [1, {"a": null}]}', '{"text": "a </tool_call> or <tool_call> {\\"} \\\\"}',
    '{ "x" : -1.5e3 }', '{"a": {"b": {"c": []}}}',
])  # fmt: skip
def test_a_call_has_its_arguments_as_they_are_written(arguments: str) -> None:
    message = hermes("I look.\n" + written("get", arguments))
    assert message == Message("I look.", "", [Call("get", arguments, True)])


@pytest.mark.parametrize(("inner", "arguments"), [
    ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
    ('{"id": 7, "name": "f", "more": [true], "parameters": {"a": 1}, "x": null}', '{"a": 1}'),
    ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
    ('{"name": "f", "arguments": null}', "{}"),
    ('{"name": "f"}', "{}"),
])  # fmt: skip
def test_members_come_in_any_order_and_arguments_in_any_form(inner: str, arguments: str) -> None:
    assert hermes(f"<tool_call>{inner}</tool_call>") == Message("", "", [Call("f", arguments, True)])


def test_several_calls_and_the_content_around_them() -> None:
    text = f"One. \n{written('f', '{}')}\n{written('g', '{}')}\n Two.\n"
    assert hermes(text) == Message("One.\n Two.\n", "", [Call("f", "{}", True), Call("g", "{}", True)])
    alone = MessageForm(parallel_tool_calls=False)
    assert hermes(text, form=alone) == Message("One.\n Two.\n", "", [Call("f", "{}", True)])


@pytest.mark.parametrize("text", [
    "<tool_call>not json</tool_call>", "<tool_call>[1]", "<tool_call>[]</tool_call>",
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {a}, "name": "f"}</tool_call>', "a <tool_cal", "</tool_call>",
    '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>', "<tool_call>}</tool_call>", "no\n calls \n",
])  # fmt: skip
def test_what_is_no_call_is_content(text: str) -> None:
    assert hermes(text) == Message(text)


@pytest.mark.parametrize("rest", [
    "<tool_call>", " <tool_call>\n{", '<tool_call>{"name": "f"', "<tool_call>[",
    '<tool_call>{"name": "f", "arguments": ',
])  # fmt: skip
def test_what_is_cut_off_before_its_arguments_is_left_out(rest: str) -> None:
    assert hermes("Well." + rest) == Message("Well.")


def test_a_call_after_what_is_none_is_found() -> None:
    assert hermes("<tool_call>oh " + written("f", "{}")) == Message("<tool_call>oh", "", [Call("f", "{}", True)])


@pytest.mark.parametrize(("text", "arguments"), [
    ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1'),
    ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "{a: 1}"),
    ('<tool_call>{"name": "f", "arguments": {}', "{}"),
])  # fmt: skip
def test_a_call_that_was_begun_and_is_not_whole_cannot_be_made(text: str, arguments: str) -> None:
    assert hermes(text) == Message("", "", [Call("f", arguments, False)])


def test_deep_and_large_arguments_are_no_error() -> None:
    deep = hermes(written("f", '{"a":' * 5000 + "1" + "}" * 5000))
    assert [(call.name, call.complete) for call in deep.calls] == [("f", False)]
    large = json.dumps({"a": "x" * 100_000})
    assert hermes(written("f", large)).calls == [Call("f", large, True)]


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = make_parser(None, HERMES, FORM)
    pieces = ['<tool_call>{"name": "f", ', '"arguments": {"a', '": "b ', ' c"', "}", "}", "</tool_call>"]
    found: list[Any] = [
        [(d.tool_call.name, d.tool_call.arguments) for d in parser.feed(p, ()) if d.tool_call] for p in pieces
    ]
    assert found == [[], [("f", '{"a')], [(None, '": "b ')], [(None, ' c"')], [(None, "}")], [(None, "")], []]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["</tool_call>", '{"}', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.tuples(
    st.sampled_from(["f", "get_weather", "é"]), st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans()
)
PLACES = st.lists(st.integers(0, 400), max_size=12)


@settings(deadline=None)
@given(st.lists(CALLS, max_size=3), PLACES)
def test_calls_are_what_was_written_however_it_is_cut(calls: list[Any], places: list[int]) -> None:
    texts = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments, ascii in calls]
    named = list(zip([json.dumps(name)[1:-1] for name, _, _ in calls], texts, strict=True))
    text = "Well.\n" + "\n".join(written(name, arguments) for name, arguments in named)
    expected = [Call(name, arguments, True) for (name, _, _), arguments in zip(calls, texts, strict=True)]
    assert hermes(*cut(text, places)) == Message("Well." if calls else "Well.\n", "", expected)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": "', '"}', "}", "{", '"', "\\", " ", "\n",
    "x",     '"name"', ":", ",", "null", "<tool", "_call>", "[1]",
]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=16), PLACES)
def test_any_text_ends_well_however_it_is_cut(fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments)
    whole = hermes(text)
    assert hermes(*cut(text, places)) == whole
    assert hermes(*text) == whole
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls if call.complete)
    if not whole.calls:
        assert text.startswith(whole.content)
