"""Calls that are held to their format, in every format: whatever is sampled from the grammar is read as calls of the
functions, with arguments that their schemas allow."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.catalog.parsers import TOOL_PARSERS
from pagemill.errors import RequestError
from pagemill.grammar.interface import GrammarBackend, TokenMatcher, num_words
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.structured_outputs import CONTROL, StructuredOutputsParams
from pagemill.serve.parsers.call_spec import Function, Spec
from pagemill.serve.parsers.call_writer import CallWriter, ChannelWriter
from pagemill.serve.parsers.engine import make_parser
from pagemill.serve.parsers.format import Channels, markers_of
from pagemill.serve.parsers.formats.json_calls import FORCED
from pagemill.serve.parsers.interface import MessageForm
from tests.fakes.messages import Message, parse

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "deep": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                          "additionalProperties": False},
                "maxItems": 2,
            },
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
HELD = [Function(name, schema) for name, schema in SCHEMAS.items()]
FREE = [Function(name, None) for name in SCHEMAS]
END = 256
FORMATS = {**{name: TOOL_PARSERS.resolve(name) for name in sorted(TOOL_PARSERS)}, "forced": FORCED}
ONE_EACH = {id(given): name for name, given in FORMATS.items()}
"""Names that stand for the same format are tested once."""


class Model:
    """A vocabulary of bytes and of a format's marks as control tokens, and one writer for it."""

    def __init__(self, name: str, has_marks: bool) -> None:
        self.given = given = FORMATS[name]
        marks = [text for text in markers_of(given) if re.match(r"<[|\uff5c]|\[[A-Z]", text)] if has_marks else []
        names = list(given.tokens) if isinstance(given, Channels) else sorted(set(marks))
        self.ids: Mapping[str, int] = {text: END + 1 + number for number, text in enumerate(names)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"] + [text.encode() for text in names]
        table = TokenTable(self.tokens, [END, *self.ids.values()], [END])
        self.backend: GrammarBackend = GRAMMARS.resolve(GUIDANCE)(table)
        writer = ChannelWriter if isinstance(given, Channels) else CallWriter
        self.writer: Any = writer(given, self.ids.get)

    def matcher(self, form: Spec) -> TokenMatcher:
        params = StructuredOutputsParams(structural_tag={"format": form}, disable_any_whitespace=True)
        return self.backend.matcher(translated(params))

    def encoded(self, text: bytes) -> list[int]:
        """The tokens of a trigger."""
        found: list[int] = []
        while text:
            mark = next((mark for mark in self.ids if text.startswith(CONTROL + mark.encode())), None)
            found.append(text[0] if mark is None else self.ids[mark])
            text = text[1:] if mark is None else text[1 + len(mark.encode()) :]
        return found

    def sampled(self, matcher: TokenMatcher, begun: Sequence[int], seed: int) -> str | None:
        """An output that the grammar allows; None where it does not end in time."""
        rng = random.Random(seed)
        out = list(begun)
        assert matcher.accept(out) == len(out)
        mask = np.zeros(num_words(len(self.tokens)), np.int32)
        ids = np.arange(len(self.tokens))
        ends = (ids > END) | np.isin(ids, list(b'"}]>)</\n,'))
        plain = (ids > END) | ((ids >= 32) & (ids < 127)) | (ids == 10)
        for _ in range(500):
            if matcher.ended or (matcher.complete and rng.random() < 0.5):
                return b"".join(self.tokens[token] for token in out).decode(errors="replace")
            matcher.fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.tokens)].astype(bool)
            allowed[END] = False
            likely = allowed & ends
            if not likely.any() or rng.random() >= 0.6:
                likely = allowed & plain
            out.append(rng.choice(np.flatnonzero(likely if likely.any() else allowed).tolist()))
            matcher.accept(out[-1:])
        return None

    def read(self, text: str) -> Message:
        return parse(make_parser(None, self.given, MessageForm(tools=TOOLS)), [text])


def check(message: Message, text: str, *, held: bool, several: bool) -> None:
    assert message.calls, text
    assert all(call.complete for call in message.calls), text
    assert not message.content.strip(), text
    assert several or len(message.calls) == 1
    for call in message.calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if held:
            jsonschema.validate(arguments, SCHEMAS[call.name])


@pytest.mark.cases(one_in=15)
@pytest.mark.parametrize("has_marks", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_what_is_sampled_is_read_as_calls(name: str, has_marks: bool) -> None:
    model = Model(name, has_marks)
    num_read = 0
    for seed, (functions, several) in enumerate([(HELD, True), (HELD, False), (FREE, False)]):
        chosen = model.writer.triggered(functions, several)
        triggers = sorted(chosen.triggers + chosen.first_triggers)
        for form, begun in (
            (model.writer.whole(functions, several), b""),
            (chosen.form, triggers[seed % len(triggers)]),
        ):
            matcher = model.matcher(form)
            for number in range(2):
                text = model.sampled(matcher.copy(), model.encoded(begun), 10 * seed + number)
                if text is not None:
                    check(model.read(text), text, held=functions is HELD, several=several)
                    num_read += 1
    assert num_read > 3


def test_marks_that_are_control_tokens_are_not_spelled() -> None:
    model = Model("lfm2", has_marks=True)
    matcher = model.matcher(model.writer.whole(HELD, True))
    assert matcher.accept([ord("<")]) == 0
    assert matcher.accept([model.ids["<|tool_call_start|>"]]) == 1


def test_mistral_writes_names_where_the_model_has_their_marks() -> None:
    newer, older = (Model("mistral", has_marks) for has_marks in (True, False))
    begin = newer.encoded(CONTROL + b"[TOOL_CALLS]" + b"now" + CONTROL + b"[ARGS]{}")
    assert newer.matcher(newer.writer.whole(FREE, False)).accept(begin) == len(begin)
    spelled = list(b'[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    assert older.matcher(older.writer.whole(FREE, False)).accept(spelled) == len(spelled)


@pytest.mark.parametrize(("name", "function"), [("pythonic", "get-it"), ("qwen3_coder", "a>b"), ("openai", "a b")])
def test_names_that_could_not_be_read_are_not_written(name: str, function: str) -> None:
    writer = Model(name, has_marks=False).writer
    assert not writer.can_name(function)
    assert writer.can_name("get_it")


@pytest.mark.parametrize(("name", "schema", "message"), [
    ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of a is not supported"),
    ("qwen3_coder", {"anyOf": [{}]}, "has anyOf beside or instead of properties"),
    ("gemma4", {"properties": {"a": {"$ref": "#/properties/a"}}}, "nested more than 16 levels deep, or refers to"),
    ("gemma4", {"properties": {str(number): {} for number in range(33)}}, "none of them is required"),
])  # fmt: skip
def test_schemas_that_a_format_cannot_be_held_to(name: str, schema: dict[str, Any], message: str) -> None:
    function = Function("f", schema, "tools.0.function.parameters", is_strict=True)
    with pytest.raises(RequestError, match=message) as caught:
        Model(name, has_marks=False).writer.whole([function], False)
    assert caught.value.field == "tools.0.function.parameters"


def test_other_values_of_elements_and_literals() -> None:
    schema = {
        "properties": {
            "a": {"type": ["string", "null"]},
            "b": {"const": 3},
            "c": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
            "d": {},
            "e": {"type": "boolean"},
            "f": {"type": "object", "properties": {"g": {"$ref": "#/$defs/g"}}, "required": ["g"]},
        },
        "required": ["a", "b", "c", "d", "e", "f"],
        "$defs": {"g": {"enum": ["x", 1]}},
    }
    written = {
        "gemma4": 'f{a:null, b:3, c:[<|"|>s<|"|>], d:{k:[1]}, e:true, f:{g:1}}<tool_call|>',
        "pythonic": '[f(a=null, b=3, c=["s"], d={"k":[1]}, e=True, f={"g":1})]',
        "glm45": "<tool_call>f\n" + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in {
                "a": "null", "b": "3", "c": '["s"]', "d": '{"k":[1]}', "e": "true", "f": '{"g":1}',
            }.items()
        ) + "</tool_call>",
    }  # fmt: skip
    written["gemma4"] = "<|tool_call>call:" + written["gemma4"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    expected = {"a": None, "b": 3, "c": ["s"], "d": {"k": [1]}, "e": True, "f": {"g": 1}}
    for name, text in written.items():
        model = Model(name, has_marks=False)
        matcher = model.matcher(model.writer.whole([Function("f", schema)], False))
        assert matcher.accept(list(text.encode())) == len(text), name
        assert matcher.ended
        (call,) = parse(make_parser(None, model.given, MessageForm(tools=tools)), [text]).calls
        assert json.loads(call.arguments) == expected, name
