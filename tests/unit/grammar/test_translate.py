import pytest

from pagemill.errors import RequestError
from pagemill.grammar.translate import TakesTimeError, Translations, translated
from pagemill.messages.structured_outputs import MAX_SPEC_BYTES, FreeStart, StructuredOutputsParams
from tests.fakes.byte_vocabulary import Following, accepts


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"regex": "^ab?$"}, ["a", "ab"], ["abb", ""]),
        ({"regex": r"a/b\$"}, ["a/b$"], ["a/b"]),
        ({"regex": "a\n\\\nb\\n"}, ["a\n\nb\n"], ["a\n\\nb\n"]),
        ({"regex": "^a$|^b$"}, ["a", "b"], ["ab"]),
        ({"choice": ["yes", 'n"o']}, ["yes", 'n"o'], ["y", "no"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}', '{\n  "a": 1\n}'], ["[]", "{", " {}"]),
        ({"grammar": 'root ::= x | [0-9]+\nx ::= "b"'}, ["12", "b"], ["bb"]),
        ({"json": '{"type": "boolean"}'}, ["true"], ["1"]),
        ({"json": {"type": "boolean"}, "free_until": "</think>"}, ["so</think>true"], ["true", "</think>1"]),
    ],
)
def test_kinds(vocabulary, form, good, bad):
    for text in good:
        assert accepts(vocabulary, text, **form), text
    for text in bad:
        assert not accepts(vocabulary, text, **form), text


@pytest.mark.parametrize(
    ("start", "good", "bad"),
    [
        (FreeStart((("</t>",),)), ["</t>true", "a</t\n</t>true"], ["true", "</t>\ntrue", "</t>a</t>true", "a</t>"]),
        (FreeStart((("</t>", "[go]"),), gap=True), ["a</t>true", "[go]\n\ntrue"], ["a</t>\n\n\ntrue", "</t>[go]true"]),
        (
            FreeStart((("</t>",),), "<t>"),
            ["true", "<t></t>true", "<t>true</t>true"],
            ["a</t>true", "\n<t></t>true", "<t>"],
        ),
        (FreeStart((("</t>",),), "<t>", True), ["true", "<t>\nso</t>\ntrue"], ["\ntrue", "\n<t></t>true", "<t>true"]),
        (FreeStart((("|final",), ("|body",))), ["|a|body|final x|bodytrue"], ["|bodytrue", "|finaltrue"]),
    ],
)
def test_what_may_come_before_a_form(vocabulary, start, good, bad):
    for text in good:
        assert accepts(vocabulary, text, start=start, json={"type": "boolean"}), text
    for text in bad:
        assert not accepts(vocabulary, text, start=start, json={"type": "boolean"}), text


def test_grammars_in_the_syntax_of_lark():
    form = {"grammar": "start: NUM\nNUM: /[0-9]+/"}
    assert accepts(Following(), "12", **form)
    assert not accepts(Following(), "x", **form)
    with pytest.raises(RequestError, match="GBNF only"):
        accepts(Following("xgrammar"), "12", **form)


def test_gaps_between_parts_of_json_are_bounded(vocabulary):
    for gap, fits in (("\n" + 40 * " ", True), (41 * " ", False), ("\n\n", False)):
        assert accepts(vocabulary, f'{{"a":{gap}1}}', json_object=True) is fits
    assert not accepts(vocabulary, '{"a": 1}', json_object=True, disable_any_whitespace=True)
    assert accepts(vocabulary, '{"a":__1}', json_object=True, whitespace_pattern="_*")


def test_integers_are_bounded(vocabulary):
    assert accepts(vocabulary, 18 * "9", json={"type": "integer"})
    assert not accepts(vocabulary, 19 * "9", json={"type": "integer"})


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"json": "{"}, "json"),
        ({"json": {"enum": ["x" * MAX_SPEC_BYTES]}}, "json"),
        ({"json": "[" * 200 + "]" * 200}, "json"),
        ({"json": '{"const": "\\ud800"}'}, "json"),
        ({"grammar": "foo"}, "grammar"),
        ({"grammar": "root ::= (((("}, "grammar"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar"),
        ({"structural_tag": "[]"}, "structural_tag"),
        ({"structural_tag": {"format": {"type": "unknown"}}}, "structural_tag"),
        ({"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<g"]}}, "structural_tag"),
    ],
)
def test_refusals_name_the_field(form, field):
    with pytest.raises(RequestError) as caught:
        translated(StructuredOutputsParams(**form))
    assert caught.value.field == field


def test_translations_are_remembered_up_to_a_size():
    translations = Translations(max_bytes=2000)
    first = translations.of(StructuredOutputsParams(regex="a"))
    assert translations.of(StructuredOutputsParams(regex="a")) is first
    for number in range(100):
        translations.of(StructuredOutputsParams(regex=f"a{number}"))
        assert translations._sources.size <= 2000
    assert translations.of(StructuredOutputsParams(regex="a")) is not first


def union(count):
    """Objects that are told apart by one of their properties."""
    branches = [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(count)]
    return {"oneOf": branches}


@pytest.mark.parametrize(
    "form",
    [
        {"json": union(50)},
        {"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "json_schema", "json_schema": union(15)} for _ in range(10)
        ]}}},
    ],
)  # fmt: skip
def test_what_takes_more_work_than_was_to_be_done_is_left_to_others(form):
    params = StructuredOutputsParams(**form)
    translations = Translations()
    with pytest.raises(TakesTimeError):
        translations.of(params, max_steps=2000)
    found = translations.of(params)
    assert translations.of(params, max_steps=2000) is found


@pytest.mark.parametrize("schema", [union(12), {"oneOf": [{"const": n, "title": f"the {n}"} for n in range(900)]}])
def test_the_schemas_of_people_take_little_work(schema):
    assert translated(StructuredOutputsParams(json=schema), max_steps=4000)
