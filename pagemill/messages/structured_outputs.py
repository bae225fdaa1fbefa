"""`StructuredOutputsParams`: the form that the output of a request must have. Knows nothing about models."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pagemill.errors import RequestError
from pagemill.messages.bounds import check_switch, refusal

MAX_CHOICES: Final = 4096
CONTROL: Final = b"\xff"
"""Stands before the name of a control token among the bytes of an output. Text has no such byte."""
MAX_SPEC_BYTES: Final = 256 << 10
"""Of a schema, an expression, a grammar, all choices together, or a structural tag."""
MAX_PATTERN_CHARS: Final = 256
MAX_END_TOKENS: Final = 64
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SWITCHES: Final = ("disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of one request's output: exactly one of the first six fields is given. RequestError names the field."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its text: the output is a JSON value that it describes."""
    regex: str | None = None
    """The output matches this regular expression as a whole."""
    choice: Sequence[str] | None = None
    """The output is one of these texts; kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in the syntax of Lark or GBNF; the output is one of its sentences."""
    json_object: bool | None = None
    """True: the output is some JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text and restricted stretches in it, as an object or its text."""
    disable_any_whitespace: bool = False
    """JSON is written without blanks and newlines."""
    disable_additional_properties: bool = False
    """Objects of a schema that does not say so have no properties besides those that it names."""
    whitespace_pattern: str | None = None
    """Regular expression of what may stand between the parts of JSON. None: at most a newline and 40 blanks."""
    free_until: str | Sequence[int] | None = None
    """The output is free until this text, or these tokens, have come: the end of reasoning. Tokens kept as a tuple."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{', '.join(given)} are given together" if given else "none is given"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; {found}", "structured_outputs"
            )
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        _check_kind(self, given[0])
        pattern = self.whitespace_pattern
        if pattern is not None and not (isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS):
            raise refusal(
                "whitespace_pattern", pattern, f"a regular expression of at most {MAX_PATTERN_CHARS} characters"
            )
        if pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "whitespace_pattern and disable_any_whitespace contradict each other", "whitespace_pattern"
            )
        _check_end(self)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """Itself, or of a mapping of its fields; fields that are None are not given."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise refusal("structured_outputs", value, f"an object with one of {', '.join(KINDS)}")
        given = {str(name): item for name, item in value.items() if item is not None}
        unknown = sorted(set(given) - set(cls.__struct_fields__))
        if unknown:
            raise RequestError(
                f"structured_outputs has {', '.join(unknown)[:200]}; allowed: {', '.join(cls.__struct_fields__)}",
                "structured_outputs",
            )
        if given.get("json_object") is False:
            del given["json_object"]
        return cls(**given)

    @property
    def kind(self) -> str:
        """Name of the one field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)


class FormRules(msgspec.Struct, frozen=True, array_like=True):
    """What holds for the forms of all requests."""

    backend: str = "guidance"
    """What follows grammars, by its name in catalog/grammars.py."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def applied(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The form that a request asks for, under these rules. Raises RequestError where they contradict it."""
        given = {name: True for name in _SWITCHES if getattr(self, name)}
        return msgspec.structs.replace(params, **given) if given else params


class FreeStart(msgspec.Struct, frozen=True, array_like=True):
    """Text before a form of which nothing is demanded: the model's reasoning."""

    ends: tuple[tuple[str, ...], ...]
    """It ends when one text of each of these steps has come, one step after the other."""
    begin: str | None = None
    """Where it may be left out: what it begins with otherwise. None: it is there."""
    gap: bool = False
    """Whether up to two line feeds may stand between it and the form."""


class FreeTokens(msgspec.Struct, frozen=True, array_like=True):
    """A `FreeStart` whose marks are tokens that no text has."""

    ends: tuple[tuple[tuple[int, ...], ...], ...]
    """It ends when one of the sequences of each of these steps has come, one step after the other."""
    begin: int | None = None
    """Where it may be left out: the token that it begins with otherwise. None: it is there."""


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """Where an output reasons, as its bytes show it: control tokens are there as CONTROL and their names."""

    begin: bytes
    end: bytes
    end_ids: tuple[int, ...]
    """The tokens of `end`."""
    is_open: bool = False
    """Whether the output begins in the middle of reasoning."""
    again: bool = False
    """Whether reasoning may begin anywhere; otherwise only where nothing but white space has come."""
    budget: int | None = None
    """After so many tokens of it, its end is written; None: it ends by itself."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A form as the engine gets it: checked, and in the terms of the library that follows it."""

    source: str
    """The grammar, as the backend of the engine reads it; empty: there is none, and only reasoning is limited."""
    free: FreeTokens | None = None
    """What may come before the grammar holds; None: it holds from the first token of the output on."""
    field: str = "structured_outputs"
    """What the client calls the form, for errors."""
    thinking: Thinking | None = None
    """Where the output reasons, if that matters."""
    triggers: tuple[bytes, ...] = ()
    """Outside of reasoning, the grammar begins with any of these; as long as none has come, the output is free. None
    here and in `first_triggers`: there is nothing to wait for."""
    first_triggers: tuple[bytes, ...] = ()
    """Likewise, where nothing but white space has come."""
    parts: tuple[tuple[str, str], ...] = ()
    """Field of the request and the grammar of what it holds alone, for errors; not for the engine."""

    @property
    def waits(self) -> bool:
        """Whether the output is free until a trigger has come."""
        return bool(self.triggers or self.first_triggers)


def _check_kind(params: StructuredOutputsParams, kind: str) -> None:
    value = getattr(params, kind)
    match kind:
        case "json" | "structural_tag":
            allowed = (str, dict, bool) if kind == "json" else (str, dict)
            if not isinstance(value, allowed) or value == "":
                raise refusal(kind, value, "an object, or its text")
        case "json_object":
            if value is not True:
                raise refusal(kind, value, "true")
        case "choice":
            texts = isinstance(value, Sequence) and not isinstance(value, str)
            if not texts or not 0 < len(value) <= MAX_CHOICES or not all(isinstance(t, str) and t for t in value):
                raise refusal(kind, value, f"a list of 1 to {MAX_CHOICES} texts, none of them empty")
            msgspec.structs.force_setattr(params, "choice", tuple(value))
        case _:
            if not isinstance(value, str) or not value:
                raise refusal(kind, value, "a text that is not empty")
    given: Sequence[object] = value if isinstance(value, (tuple, list)) else [value]
    if sum(len(item) for item in given if isinstance(item, str)) > MAX_SPEC_BYTES:
        raise RequestError(f"{kind} is too long: at most {MAX_SPEC_BYTES} characters are allowed", kind)


def _check_end(params: StructuredOutputsParams) -> None:
    end = params.free_until
    if end is None or isinstance(end, str):
        if end is not None and not 0 < len(end) <= MAX_PATTERN_CHARS:
            raise refusal("free_until", end, f"a text of 1 to {MAX_PATTERN_CHARS} characters, or token ids")
        return
    ids = tuple(end) if isinstance(end, Sequence) else ()
    good = all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids)
    if not 0 < len(ids) <= MAX_END_TOKENS or not good:
        raise refusal("free_until", end, f"a text, or 1 to {MAX_END_TOKENS} token ids")
    msgspec.structs.force_setattr(params, "free_until", ids)


def spec_bytes(value: str | Mapping[str, Any] | bool) -> int:
    """Bytes of a schema or a tag as JSON, or of its text. Raises ValueError for what is no JSON."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
