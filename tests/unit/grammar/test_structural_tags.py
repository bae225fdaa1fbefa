import pytest

from tests.fakes.byte_vocabulary import accepts

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = {"begin": "<fn=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</fn>"}
NOTE = {"begin": "<fn=b>", "content": {"type": "any_text"}, "end": "</fn>"}


def const(value):
    return {"type": "const_string", "value": value}


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
    ],
)
def test_formats(vocabulary, form, good, bad):
    for text in good:
        assert accepts(vocabulary, text, structural_tag={"format": form}), text
    for text in bad:
        assert not accepts(vocabulary, text, structural_tag={"format": form}), text


def test_the_older_form(vocabulary):
    form = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    assert accepts(vocabulary, 'so <f>{"x":1}</f>.', structural_tag=form)
    assert not accepts(vocabulary, "so <f>1</f>", structural_tag=form)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"type": "dispatch"}, "dispatch"),
        ({"type": "json_schema", "style": "qwen_xml"}, "style"),
        ({"type": "repeat", "min": 3, "max": 1, "content": const("a")}, "repeat"),
        ({"type": "sequence", "elements": []}, "elements"),
        ({"type": "const_string", "value": 1}, "value"),
        (None, "type"),
    ],
)
def test_refusals(vocabulary, form, word):
    with pytest.raises(ValueError, match=word):
        accepts(vocabulary, "", structural_tag={"format": form})


def test_nesting_is_bounded(vocabulary):
    form = const("a")
    for _ in range(60):
        form = {"type": "optional", "content": form}
    with pytest.raises(ValueError, match="levels deep"):
        accepts(vocabulary, "", structural_tag={"format": form})
