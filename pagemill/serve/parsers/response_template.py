"""`formats_of`: a response template, as transformers reads it from a `tokenizer_config.json`, as formats of
messages. What cannot be said by them is refused. Does not know how a format is read.

The template's form is that of `transformers.utils.chat_parsing`, version 1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from pagemill.errors import ConfigError
from pagemill.serve.parsers.format import (
    CallForm,
    Calls,
    ElementCall,
    Head,
    JsonCall,
    NamedCall,
    NotationCall,
    Reasoning,
    Written,
)
from pagemill.serve.parsers.response_pattern import (
    MAX_PATTERN_CHARS,
    Anything,
    Begin,
    Captured,
    Either,
    Part,
    PatternError,
    Space,
    Text,
    parts_of,
)

HF: Final = "hf"
"""The name of the parsers that follow the model's response template."""
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
CONTENT: Final = "content"
TOOL_CALLS: Final = "tool_calls"
_MAX_TEXTS: Final = 32
"""Of fixed texts in one list."""
_TEMPLATE_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS: Final = frozenset(
    {
        "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
        "transform", "transform_each",
    }
)  # fmt: skip
_ANY_BUT_SPACE: Final = r"[^\s<>]"
_CONTENT: Final = "{content}"


class TemplateFormats(msgspec.Struct, frozen=True):
    """What a template says of messages."""

    reasoning: Reasoning | None = None
    """None: it has no field for it."""
    calls: Calls | None = None
    """None: it has no field for them."""


def formats_of(template: Any) -> TemplateFormats:
    """Raises ConfigError for a template that is malformed, or says what formats cannot."""
    fields = _fields_of(template)
    names = [name for name in fields if name in REASONING_FIELDS]
    for name in fields:
        if name not in (*REASONING_FIELDS, CONTENT, TOOL_CALLS):
            _refuse(name, f"is none of {', '.join((*REASONING_FIELDS, CONTENT, TOOL_CALLS))}")
    if len(names) > 1:
        _refuse(names[1], f"stands beside {names[0]}, and a message has one reasoning")
    _check_apart(fields)
    content = fields.get(CONTENT, {})
    drops = _content_marks(content) if content else ()
    keeps_space = _keeps_space(content)
    reasoning = _reasoning(names[0], fields[names[0]], drops) if names else None
    calls = _calls(fields[TOOL_CALLS], drops, keeps_space) if TOOL_CALLS in fields else None
    return TemplateFormats(reasoning, calls)


def _fields_of(template: Any) -> Mapping[str, Mapping[str, Any]]:
    """The fields, each with known keys only."""
    if not isinstance(template, Mapping):
        raise ConfigError(f"response_template is a {type(template).__name__}, not an object")
    if template.get("version", 1) != 1:
        raise ConfigError(f"response_template.version={template['version']!r} is not supported: 1 is")
    if unknown := sorted(set(template) - _TEMPLATE_KEYS):
        raise ConfigError(f"response_template.{unknown[0]} is not known: {', '.join(sorted(_TEMPLATE_KEYS))}")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError("response_template.fields must be an object with at least one field")
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            _refuse(name, f"is a {type(field).__name__}, not an object")
        if unknown := sorted(set(field) - _FIELD_KEYS):
            _refuse(f"{name}.{unknown[0]}", f"is not known: {', '.join(sorted(_FIELD_KEYS))}")
        if name != CONTENT and "open" not in field and "open_pattern" not in field:
            _refuse(name, f"has no open: only {CONTENT} may stand where nothing was opened")
    return fields


def _check_apart(fields: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses regions whose beginnings share a mark: messages with headers, of which what is between is left out."""
    opens = {name: field["open"] for name, field in fields.items() if isinstance(field.get("open"), str)}
    for name, text in opens.items():
        for other, text_of_other in opens.items():
            mark, closed, _ = text.partition(">")
            if name < other and closed and text != text_of_other and text_of_other.startswith(mark + closed):
                _refuse(
                    other,
                    f"begins with the mark of {name}, {mark + closed!r}: messages with headers are read by a format of "
                    "their own (openai_gptoss and openai, kimi_k3)",
                )


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"response_template.fields.{name} {why}")


# Anchors


def _anchor(name: str, field: Mapping[str, Any], kind: str) -> tuple[Part, ...]:
    """The parts of what opens or closes a region; none: it is not said."""
    key = f"{kind}_pattern"
    if kind in field and key in field:
        _refuse(name, f"has both {kind} and {key}")
    if key in field:
        pattern = field[key]
        if not isinstance(pattern, str):
            _refuse(f"{name}.{key}", f"is a {type(pattern).__name__}, not a text")
        return _parts(f"{name}.{key}", pattern)
    texts = field.get(kind, [])
    texts = [texts] if isinstance(texts, str) else texts
    good = isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)
    if not good or (kind in field and not texts) or len(texts) > _MAX_TEXTS:
        _refuse(f"{name}.{kind}", f"must be a text, or a list of 1 to {_MAX_TEXTS} of them, none of them empty")
    if max(map(len, texts), default=0) > MAX_PATTERN_CHARS:
        _refuse(f"{name}.{kind}", f"has a text of more than {MAX_PATTERN_CHARS} characters")
    if len(texts) > 1:
        return (Either(tuple((Text(text),) for text in texts)),)
    return tuple(Text(text) for text in texts)


def _parts(name: str, pattern: str) -> tuple[Part, ...]:
    try:
        return parts_of(pattern)
    except PatternError as error:
        _refuse(name, f"cannot be read here: {error}")


def _texts(name: str, parts: Sequence[Part]) -> list[str]:
    """The fixed texts that parts may be, white space around them left out."""
    parts = _bare(parts)
    if len(parts) == 1 and isinstance(parts[0], Text):
        return [parts[0].text]
    if len(parts) == 1 and isinstance(parts[0], Either):
        return [text for choice in parts[0].choices for text in _texts(name, choice)]
    _refuse(name, "is more than a fixed text, with white space around it perhaps")


def _bare(parts: Sequence[Part]) -> list[Part]:
    """Without white space at both ends."""
    found = list(parts)
    while found and isinstance(found[0], Space):
        del found[0]
    while found and isinstance(found[-1], Space):
        del found[-1]
    return found


# Reasoning and content


def _reasoning(name: str, field: Mapping[str, Any], drops: tuple[str, ...]) -> Reasoning:
    _check_text(name, field)
    if field.get("repeats") or field.get("join") is not None:
        _refuse(f"{name}.repeats", "is not supported: reasoning stands before the content, once")
    opening = _bare(_anchor(name, field, "open"))
    unasked = False
    if len(opening) == 1 and isinstance(opening[0], Either):
        choices = [choice for choice in opening[0].choices if choice not in ((Begin(),), ())]
        unasked = len(choices) < len(opening[0].choices)
        opening = [Either(tuple(choices))]
    begin = _texts(f"{name}.open", opening)
    end = _texts(f"{name}.close", _anchor(name, field, "close"))
    for kind, texts in (("open", begin), ("close", end)):
        if len(texts) != 1:
            _refuse(f"{name}.{kind}", "names several texts, and reasoning stands between two")
    return Reasoning(begin[0], end[0], drops=drops, unasked=unasked, trims=not _keeps_space(field))


def _content_marks(field: Mapping[str, Any]) -> tuple[str, ...]:
    """The marks around content, which are left out wherever they stand in it."""
    _check_text(CONTENT, field)
    found: list[str] = []
    for kind in ("open", "close"):
        parts = _anchor(CONTENT, field, kind)
        texts = _texts(f"{CONTENT}.{kind}", parts) if parts else []
        if kind == "close":
            found += [f"\n{text}" for text in texts if isinstance(parts[0], Space)]
        found += texts
    return tuple(dict.fromkeys(found))


def _check_text(name: str, field: Mapping[str, Any]) -> None:
    if field.get("content", "text") != "text":
        _refuse(f"{name}.content", f"is {field['content']!r}: only 'text' is supported here")
    _arguments(name, field, {"strip"})
    if field.get("transform") is not None:
        _refuse(f"{name}.transform", "is not supported: the text is passed on as it is")


def _keeps_space(field: Mapping[str, Any]) -> bool:
    return field.get("content_args", {}).get("strip", True) is False


def _arguments(name: str, field: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """`content_args`, which must have no others."""
    found = field.get("content_args", {})
    if not isinstance(found, Mapping):
        _refuse(f"{name}.content_args", "must be an object")
    if unknown := sorted(set(found) - known):
        _refuse(f"{name}.content_args.{unknown[0]}", "is not supported")
    return found


# Calls


def _calls(field: Mapping[str, Any], drops: tuple[str, ...], keeps_space: bool) -> Calls:
    begin, head = _opening(_anchor(TOOL_CALLS, field, "open"))
    closing = _bare(_anchor(TOOL_CALLS, field, "close"))
    inner, end = _closing(closing)
    kind = field.get("content", "text")
    name, arguments = _named(field)
    form: CallForm
    if kind == "xml-inline":
        form = _element(field, head, inner)
        inner = ""
        end = () if form.end in end else end
    elif kind != "json":
        _refuse(f"{TOOL_CALLS}.content", f"is {kind!r}: 'json' and 'xml-inline' are supported for calls")
    elif head is None:
        _arguments(TOOL_CALLS, field, set())
        if name is None or arguments is None:
            _refuse(f"{TOOL_CALLS}.transform", "does not say which members are the name and the arguments")
        form = JsonCall(name=name, arguments=(arguments,))
    else:
        form = _after_name(field, head)
    if head is not None and (name, arguments) != (None, None):
        _refuse(f"{TOOL_CALLS}.transform", 'must have name "{name}" and arguments "{content}" where open has the name')
    after = inner + (end[0] if end else "")
    whole = f"{begin}[" if field.get("transform_each") else begin
    between, last = (", ", f"]{after}") if field.get("transform_each") else (f"{after}{begin}", after)
    return Calls(
        form=(form,),
        written=(Written(whole, between, last),),
        begin=(begin,),
        end=end,
        between=(inner,) if inner else (),
        many=bool(field.get("transform_each")),
        drops=drops,
        keeps_space=keeps_space,
    )


def _opening(parts: Sequence[Part]) -> tuple[str, Head | None]:
    """The mark that begins calls, and what names one after it; None: its content does."""
    parts = _bare(parts)
    if not parts or not isinstance(parts[0], Text):
        _refuse(f"{TOOL_CALLS}.open", "must begin with a fixed text")
    begin = parts[0].text
    rest = _bare(parts[1:])
    if not rest:
        return begin, None
    begin, closed, start = begin.rpartition(">")
    begin, start = (begin + closed, start) if closed else (start, "")
    if isinstance(rest[0], Text):
        start += rest[0].text
        rest = rest[1:]
    if not rest or not isinstance(rest[0], Captured) or rest[0].name != "name":
        _refuse(f"{TOOL_CALLS}.open_pattern", "has no group (?P<name>...) after its fixed texts")
    captured = rest[0]
    rest = rest[1:]
    skips = bool(rest) and isinstance(rest[0], Anything)
    rest = _bare(rest[1:] if skips else rest)
    if any(not isinstance(part, Text) for part in rest) or len(rest) > 1 or (skips and not rest):
        _refuse(f"{TOOL_CALLS}.open_pattern", "has more than one fixed text after the name")
    end = rest[0].text if rest and isinstance(rest[0], Text) else ""
    chars = captured.chars or _ANY_BUT_SPACE
    pattern = rf"(?P<name>(?:{chars})+)\s*"
    if skips:
        pattern = rf"(?P<name>(?:{chars})+).*"
        chars = r"[\s\S]"
    head = Head(start, (), chars=rf"(?:{chars}|\s)", pattern=pattern)
    return begin, _ended(head, (end,)) if end else head


def _ended(head: Head, ends: tuple[str, ...], keeps_end: bool = False) -> Head:
    """The same, ended by one of these, which are no part of the name whatever the class of its characters says."""
    chars = rf"(?!{'|'.join(map(re.escape, ends))}){head.chars}"
    return msgspec.structs.replace(head, end=ends, keeps_end=keeps_end, chars=chars)


def _closing(parts: Sequence[Part]) -> tuple[str, tuple[str, ...]]:
    """The mark that ends a call, where another one follows it; and the marks after calls."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    if len(parts) == 3 and len(texts) == 2 and isinstance(parts[1], Space):
        return texts[0], (texts[1],)
    return "", tuple(_texts(f"{TOOL_CALLS}.close", parts)) if parts else ()


def _named(field: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The members that are the name and the arguments of a call; None: they stand elsewhere."""
    transform = field.get("transform")
    where = f"{TOOL_CALLS}.transform"
    if not isinstance(transform, Mapping) or not set(transform) <= {"type", "id", "function"}:
        _refuse(where, 'must be an object of "type", "id" and "function"')
    function = transform.get("function")
    each = bool(field.get("transform_each"))
    if function == _CONTENT and not each:
        return "name", "arguments"
    if not isinstance(function, Mapping) or set(function) != {"name", "arguments"}:
        _refuse(f"{where}.function", 'must be "{content}" or have "name" and "arguments"')
    found = []
    for key in ("name", "arguments"):
        value = function[key]
        path = value[1:-1] if isinstance(value, str) and value[:1] + value[-1:] == "{}" else ""
        member = path if each else path.removeprefix("content.")
        if not path or "." in member:
            _refuse(f"{where}.function.{key}", f"is {value!r}, and not the name of a group or of a member")
        found.append(member if each or member != path else None)
    if not each and function["name"] == "{name}" and function["arguments"] == _CONTENT:
        return None, None
    return found[0], found[1]


def _after_name(field: Mapping[str, Any], head: Head) -> CallForm:
    """Arguments after the head that names the call."""
    given = _arguments(TOOL_CALLS, field, {"unquoted_keys", "string_delims"})
    quotes = given.get("string_delims", [])
    if not quotes and not given.get("unquoted_keys"):
        return NamedCall(head if head.end else _ended(head, ("{",), keeps_end=True))
    pairs = [pair for pair in quotes if isinstance(pair, list) and len(pair) == 2 and pair[0] == pair[1] and pair[0]]
    if not given.get("unquoted_keys") or not pairs or len(pairs) < len(quotes):
        _refuse(f"{TOOL_CALLS}.content_args", "needs unquoted_keys, and string_delims of the same text on both sides")
    if head.end:
        _refuse(f"{TOOL_CALLS}.open_pattern", "must end with the name where keys are not quoted")
    return NotationCall(
        _ended(head, ("{",)),
        end="}",
        assigns=":",
        quotes=tuple(pair[0] for pair in pairs),
        escapes=False,
        bare_strings=True,
    )


def _element(field: Mapping[str, Any], head: Head | None, end: str) -> ElementCall:
    """Arguments as elements, by the expression for one of them."""
    given = _arguments(TOOL_CALLS, field, {"tag_pattern", "value_parser"})
    if head is None:
        _refuse(f"{TOOL_CALLS}.open_pattern", "has no group (?P<name>...), which xml-inline needs")
    parser = given.get("value_parser")
    as_json = {"name": "json", "args": {"allow_non_json": True}}
    if parser not in (None, {"name": "text"}, {"name": "text", "args": {}}, as_json):
        _refuse(f"{TOOL_CALLS}.content_args.value_parser", f"is {parser!r}: only text, and json or text, is supported")
    where = f"{TOOL_CALLS}.content_args.tag_pattern"
    parts = _parts(where, given.get("tag_pattern", ""))
    wraps = any(isinstance(part, Space) for part in parts)
    found = [part for part in parts if not isinstance(part, Space)]
    match found:
        case [Text(start), Captured("key", chars), Text(key_end), Captured("value", ""), Text(value_end)]:
            value_begin = ""
        case [Text(start), Captured("key", chars), Text(key_end), Text(value_begin), Captured("value", ""), Text(end_)]:
            value_end = end_
        case _:
            _refuse(where, "is not a text, (?P<key>...), a text or two, (?P<value>.*?) and a text")
    argument = Head(start, (key_end,), chars=chars or r"[^<>\n]")
    end = end or _element_end(field, head)
    if not head.end:
        head = _ended(head, ("\n", start, end), keeps_end=True)
    return ElementCall(head, argument, value_begin, value_end, end, wraps=wraps)


def _element_end(field: Mapping[str, Any], head: Head) -> str:
    """What ends a call where its template leaves that to the mark after it: the tag that its head opens."""
    name = head.start.strip("<= \n")
    return f"</{name}>" if name else _texts(f"{TOOL_CALLS}.close", _anchor(TOOL_CALLS, field, "close"))[0]
