"""The form of an output, in the fields of the API that may ask for one: `response_format`, `structured_outputs` and
`guided_*`. Does not know what a grammar is."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pagemill.errors import RequestError
from pagemill.messages.structured_outputs import MAX_SPEC_BYTES, StructuredOutputsParams
from pagemill.utils.text import shown

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older names of the API -> kinds of form."""
FORM_FIELDS = ("response_format", "structured_outputs", *GUIDED)
MAX_SCANNED_BYTES = 5 << 18
"""Of a body whose forms are measured where it arrives: 1 to 20 ms."""
MAX_ESCAPED_BYTES = 3 * MAX_SPEC_BYTES
"""Of a form as JSON without blanks between its parts: characters may be written as up to three times their bytes."""
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_PARAMETER = "structured_outputs"
_PARTS = frozenset(StructuredOutputsParams.__struct_fields__)


_Forms = msgspec.defstruct("_Forms", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in FORM_FIELDS])
_scan = msgspec.json.Decoder(_Forms).decode


def check_form_bytes(raw: bytes) -> None:
    """Raises RequestError for the bytes of a body with a form that is far too long, before anything is made of it. What
    else is wrong with it is left to those who read it."""
    if not MAX_ESCAPED_BYTES < len(raw) <= MAX_SCANNED_BYTES or not any(name.encode() in raw for name in FORM_FIELDS):
        return
    try:
        found = _scan(raw)
        sizes = {name: len(msgspec.json.format(getattr(found, name), indent=-1)) for name in FORM_FIELDS}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    for name, size in sizes.items():
        if size > MAX_ESCAPED_BYTES:
            raise RequestError(f"{name} is too long: {size} bytes; at most {MAX_SPEC_BYTES} are allowed", name)


def form_of(fields: Mapping[str, Any], whitespace_pattern: Any = None) -> StructuredOutputsParams | None:
    """The form that the fields of a body ask for: `response_format`, `structured_outputs` and those of GUIDED, None
    where they are not given. `whitespace_pattern`: goes with the latter. Raises RequestError for one that makes no
    sense, and for two of them."""
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    if whitespace_pattern is not None and "guided_json" not in given:
        raise RequestError("guided_whitespace_pattern goes with guided_json", "guided_whitespace_pattern")
    if len(given) > 1:
        named = " and ".join(f"{name}={shown(value)}" for name, value in given.items())
        raise RequestError(f"{named} contradict each other: give one of them", list(given)[-1])
    if not given:
        return None
    name, value = next(iter(given.items()))
    with naming_form(name):
        if name == "response_format":
            return _of_format(value)
        if name == "structured_outputs":
            return StructuredOutputsParams.of(value)
        return StructuredOutputsParams.of({GUIDED[name]: value, "whitespace_pattern": whitespace_pattern})


@contextlib.contextmanager
def naming_form(field: str | None) -> Iterator[None]:
    """In errors about a form: what the client calls it, `field` of the body. None: there is no form."""
    try:
        yield
    except RequestError as error:
        if field is None or (error.field not in _PARTS and _PARAMETER not in str(error)):
            raise
        message = str(error)
        part = error.field or ""
        if part in _PARTS and message.startswith(part):
            message = _path(field, part) + message.removeprefix(part)
        elif field != _PARAMETER:
            message = message.replace(_PARAMETER, field)
        raise RequestError(message, _name(field, part)) from None


def _path(field: str, part: str) -> str:
    """Where in the body a part of the form is."""
    if field == _PARAMETER:
        return f"{field}.{part}"
    if field == "response_format" and part == "json":
        return "response_format.json_schema.schema"
    return _name(field, part)


def _name(field: str, part: str) -> str:
    """The field of the body that has a part of the form, or of an error that only mentions it."""
    if part == "whitespace_pattern" and field in GUIDED:
        return "guided_whitespace_pattern"
    return field if part in _PARTS or part in ("", _PARAMETER) else part


def _of_format(value: Any) -> StructuredOutputsParams | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format={shown(value)} is not allowed: an object whose type is one of {', '.join(_FORMATS)}",
            "response_format",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={key: item for key, item in value.items() if key != "type"})
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(
            f"response_format.json_schema={shown(described)} is not allowed: an object with a schema: "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            "response_format",
        )
    return StructuredOutputsParams(json=schema)
