import json

import pytest

from pagemill.errors import RequestError
from pagemill.serve.http.schemas import forms
from pagemill.serve.http.schemas.forms import FORM_FIELDS, check_form_bytes, form_of, naming_form

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "json", SCHEMA),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "structural_tag", {"format": {}}),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, "choice", ("a", "b")),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, "choice", ("a",)),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
    ],
)
def test_fields(fields, kind, value):
    form = form_of(fields)
    assert form.kind == kind
    assert getattr(form, kind) == value


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_free_text(fields):
    assert form_of(fields) is None


def test_the_pattern_of_gaps_goes_with_guided_json():
    assert form_of({"guided_json": SCHEMA}, "_").whitespace_pattern == "_"


def test_the_pattern_of_gaps_without_guided_json_is_refused():
    with pytest.raises(RequestError, match="guided_json"):
        form_of({"guided_regex": "a"}, "_")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, field):
    with pytest.raises(RequestError) as caught:
        form_of(fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_choice": []}, r"guided_choice=\[\] is not allowed: a list of 1 to 4096 texts"),
        ({"structured_outputs": {"choice": 5}}, "structured_outputs.choice=5 is not allowed: a list"),
        ({"structured_outputs": {"regex": "a", "free_until": ""}}, "structured_outputs.free_until='' is not allowed"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format.json_schema="),
        ({"guided_json": {}, "guided_regex": "a"}, r"guided_json=\{\} and guided_regex='a' contradict each other"),
    ],
)
def test_errors_say_what_the_client_sent(fields, message):
    with pytest.raises(RequestError, match=f"^{message}"):
        form_of(fields)


def test_the_pattern_of_gaps_is_named():
    with pytest.raises(RequestError, match=r"^guided_whitespace_pattern=5 is not allowed") as caught:
        form_of({"guided_json": {}}, 5)
    assert caught.value.field == "guided_whitespace_pattern"


@pytest.mark.parametrize(
    ("error", "message", "named"),
    [
        (RequestError("json={} is not supported: x", "json"), "format={} is not supported: x", "format"),
        (RequestError("structured_outputs is too large", "structured_outputs"), "format is too large", "format"),
        (RequestError("ignore_eos goes not with structured_outputs", "ignore_eos"), "ignore_eos goes not with format",
         "ignore_eos"),
        (RequestError("top_p=9", "top_p"), "top_p=9", "top_p"),
    ],
)  # fmt: skip
def test_errors_that_are_found_later_are_named_too(error, message, named):
    with pytest.raises(RequestError) as caught, naming_form("format"):
        raise error
    assert (str(caught.value), caught.value.field) == (message, named)


@pytest.mark.parametrize("field", FORM_FIELDS)
def test_what_is_far_too_long_is_refused_unread(field):
    raw = json.dumps({"prompt": "a", field: {"enum": ["x" * 1000] * 1000}}).encode()
    with pytest.raises(RequestError, match=f"{field} is too long: [0-9]+ bytes; at most 262144 are allowed") as caught:
        check_form_bytes(raw)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 1_000_000},
        {"prompt": '"guided_json"' + "x" * 1_000_000, "guided_json": {}},
        {"guided_json": {"enum": ["\u4e16" * 80_000]}, "prompt": "x" * 500_000},
        ["guided_json", "x" * 1_000_000],
    ],
)
def test_large_bodies_with_forms_that_are_not_are_left_to_those_who_read_them(body):
    check_form_bytes(json.dumps(body).encode())


def test_blanks_and_escapes_are_not_held_against_a_form():
    form = {"enum": [{str(number): {"a": {"b": ["\u4e16", 1]}}} for number in range(5000)]}
    raw = json.dumps({"prompt": "a", "guided_json": form}, indent=8).encode()
    assert len(raw) > forms.MAX_ESCAPED_BYTES
    check_form_bytes(raw)


@pytest.mark.parametrize("raw", [b"{", b'{"guided_json": ', b'{"guided_json": [[[' + b"[" * 900_000, b"\xff" * 900_000])
def test_what_is_no_json_is_left_to_those_who_read_it(raw):
    check_form_bytes(raw + b' "guided_json" ' + b" " * 800_000)
