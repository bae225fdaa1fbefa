import pytest

from pagemill.grammar.translate import translated
from pagemill.messages.structured_outputs import StructuredOutputsParams
from tests.fakes.byte_vocabulary import Following, accepts

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = {"begin": "<fn=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</fn>"}
NOTE = {"begin": "<fn=b>", "content": {"type": "any_text"}, "end": "</fn>"}


def const(value):
    return {"type": "const_string", "value": value}


ANY = {"type": "any_text"}
PAIR, QUOTE, TRUE = 258, 257, 259
"""Tokens of several bytes."""


def token(number):
    return {"type": "token", "token": number}


def tag(begin, value="", end=""):
    return {"type": "tag", "begin": begin, "content": const(value), "end": end}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            {"type": "triggered_tags", "triggers": ["<fn="], "tags": [CALL, NOTE]},
            ["hi", 'a <fn=a>{"x":1}</fn> b', '<fn=b>any{</fn><fn=a>{"x": 3}</fn>'],
            ['<fn=a>{"y":1}</fn>', "<fn=c>", "x <fn=b>open"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<fn="], "tags": [NOTE], "at_least_one": True},
            ["<fn=b></fn>"],
            ["x"],
        ),
        ({"type": "sequence", "elements": [const("a"), {"type": "regex", "pattern": "[0-9]"}]}, ["a1"], ["a", "1"]),
        ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["x"], ["z"]),
        (
            {"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [tag("a"), tag("b")]},
            ["a", "a,b"],
            ["", "a,", "ab"],
        ),
        (tag("<a>", "x", "</a>"), ["<a>x</a>"], ["x"]),
        (
            {
                "type": "sequence",
                "elements": [ANY, const("END"), ANY, {"type": "or", "elements": [const("1"), const("2")]}],
            },
            ["END1", "xENEND yy2"],
            ["xEND", "1", "END", "x1"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]*"}, tag("end", "", ";")]},
            ["end;", "xend;", "endend;"],
            ["x;", "end"],
        ),
        (
            {
                "type": "sequence",
                "elements": [{"type": "optional", "content": ANY}, tag("<a>", "x", "</a>"), const("z")],
            },
            ["<a>x</a>z", "y<a>x</a>z"],
            ["<a>y</a>z", "<a>x</a>"],
        ),
        (
            tag("<a>") | {"end": "</a>", "content": {"type": "triggered_tags", "triggers": ["<fn="], "tags": [NOTE]}},
            ["<a></a>", "<a>b</a>", "<a>b<fn=b>x</fn>c</a>"],
            ["<a>b<fn=b>x</a>", "<a>b"],
        ),
        ({"type": "tag", "begin": "<", "content": ANY, "end": [">", ")"]}, ["<x>", "<x)"], ["<x", "<x]"]),
        (ANY | {"excludes": ["no", "on"]}, ["", "n", "n o"], ["no", "ton"]),
        (
            {
                "type": "dispatch",
                "rules": [["<k>", const("v")], ["<n>", {"type": "regex", "pattern": "[0-9]+;"}]],
                "excludes": ["no"],
            },
            ["", "a<k>v b<n>12; c", "n o"],
            ["<k>w", "noo", "<k>v no", "<n>1"],
        ),
        ({"type": "dispatch", "rules": [["<k>", const("v")]], "loop": False}, ["x", "x<k>v"], ["x<k>v ", "<k>"]),
        (
            {"type": "triggered_tags", "triggers": ["<fn="], "tags": [NOTE], "excludes": ["no"]},
            ["x<fn=b>no</fn>y"],
            ["no<fn=b></fn>", "<fn=b></fn>no"],
        ),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
        (
            {
                "type": "qwen_xml_parameter",
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "s": {"type": "string"},
                        "n": {"type": "integer"},
                        "e": {"type": "string", "enum": ["a"]},
                    },
                    "required": ["s"],
                },
            },
            [
                '<parameter=s>a\n"b</parameter>\n<parameter=n>10</parameter>',
                "<parameter=s></parameter><parameter=e>a</parameter>",
            ],
            ["<parameter=n>10</parameter>", "<parameter=s>a</parameter><parameter=n>x</parameter>", "<parameter=s>a"],
        ),
    ],
)
def test_formats(vocabulary, form, good, bad):
    for text in good:
        assert accepts(vocabulary, text, structural_tag={"format": form}), text
    for text in bad:
        assert not accepts(vocabulary, text, structural_tag={"format": form}), text


CALLED = {"begin": token(QUOTE), "content": const("k"), "end": "!"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (token(QUOTE), [[QUOTE]], [[], [65], [256]]),
        ({"type": "exclude_token", "exclude_tokens": [QUOTE]}, [[65], [PAIR]], [[], [QUOTE], [256], [65, 65]]),
        ({"type": "exclude_token"}, [[65], [QUOTE]], [[256]]),
        ({"type": "any_tokens", "exclude_tokens": [65]}, [[], [66] * 5, [QUOTE]], [[65], [66, 65]]),
        ({"type": "any_tokens", "max_tokens": 2}, [[], [66] * 2], [[66] * 3]),
        (
            {
                "type": "tag",
                "begin": token(QUOTE),
                "content": {"type": "any_tokens", "exclude_tokens": [TRUE]},
                "end": token(TRUE),
            },
            [[QUOTE, TRUE], [QUOTE, 65, PAIR, TRUE]],
            [[QUOTE, 65], [65, TRUE]],
        ),
        (
            {"type": "token_triggered_tags", "trigger_tokens": [QUOTE], "tags": [CALLED], "exclude_tokens": [65]},
            [[], [66], [66, QUOTE, *b"k!", 67, QUOTE, *b"k!"]],
            [[65], [QUOTE], [QUOTE, 66]],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": [QUOTE],
                "tags": [CALLED],
                "at_least_one": True,
                "stop_after_first": True,
            },
            [[66, QUOTE, *b"k!"]],
            [[66], [QUOTE, *b"k!", 66]],
        ),
        (
            {"type": "token_dispatch", "rules": [[QUOTE, const("k")], ['{"', const("l")]], "loop": False},
            [[66], [66, QUOTE, *b"k"], [PAIR, *b"l"]],
            [[QUOTE, *b"l"], [PAIR, *b"k"], [QUOTE, *b"k", 66]],
        ),
    ],
)
@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
def test_formats_of_tokens(backend, form, good, bad):
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    params = StructuredOutputsParams(structural_tag={"format": form})
    made = Following(backend).backend.matcher(translated(params, backend, token_of={'{"': PAIR}.get))
    for tokens, allowed in [*((one, True) for one in good), *((one, False) for one in bad)]:
        matcher = made.copy()
        assert (matcher.accept(tokens) == len(tokens) and matcher.complete) == allowed, tokens


def test_the_older_form(vocabulary):
    form = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    assert accepts(vocabulary, 'so <f>{"x":1}</f>.', structural_tag=form)
    assert not accepts(vocabulary, "so <f>1</f>", structural_tag=form)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"type": "unknown"}, "unknown.*token_dispatch"),
        ({"type": "dispatch"}, "rules"),
        ({"type": "json_schema", "style": "glm_xml"}, "style"),
        ({"type": "json_schema", "any_order": True}, "any_order"),
        (ANY | {"max_tokens": 5}, "max_tokens"),
        (const("a") | {"vaule": "b"}, "vaule"),
        ({"type": "tag", "begin": ANY, "content": ANY, "end": ">"}, "begin and end of a tag"),
        (token("nothing"), "nothing.*no token"),
        (token(10**9), "(?i)token"),
        ({"type": "sequence", "elements": [ANY, {"type": "json_schema"}]}, "free text must be followed"),
        ({"type": "sequence", "elements": [{"type": "any_tokens"}, const("a")]}, "any tokens must be followed"),
        ({"type": "qwen_xml_parameter", "json_schema": {"allOf": []}}, "allOf"),
        ({"type": "repeat", "min": 3, "max": 1, "content": const("a")}, "repeat"),
        ({"type": "sequence", "elements": []}, "elements"),
        ({"type": "const_string", "value": 1}, "value"),
        (None, "type"),
    ],
)
def test_refusals(vocabulary, form, word):
    with pytest.raises(ValueError, match=word):
        accepts(vocabulary, "", structural_tag={"format": form})


def test_work_is_bounded(vocabulary):
    """A format is written once for each text that may end it, and so are those in it."""
    texts = {"type": "or", "elements": [const(letter) for letter in "abcdefgh"]}
    form = leaf = {"type": "regex", "pattern": "[0-9]*"}
    for _ in range(15):
        form = {"type": "or", "elements": [{"type": "sequence", "elements": [form, texts]}, leaf]}
    with pytest.raises(ValueError, match="too large"):
        accepts(vocabulary, "", structural_tag={"format": form})


def test_nesting_is_bounded(vocabulary):
    form = const("a")
    for _ in range(60):
        form = {"type": "optional", "content": form}
    with pytest.raises(ValueError, match="levels deep"):
        accepts(vocabulary, "", structural_tag={"format": form})
