"""Structural tags: free text, and stretches of it that must have a form. Knows nothing about tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

MAX_DEPTH: Final = 48
MAX_REPEATS: Final = 1024
MAX_TOKEN_ID: Final = 2**31
LEGACY: Final = "structures"


class TagWriter(Protocol):
    """Writes the rules of one grammar. What it returns are names of rules, and texts: they go into bodies of rules with
    blanks between them, `|`, `*`, `+`, `?`, `{m,n}` and parentheses."""

    def rule(self, body: str) -> str:
        """Add a rule."""

    def text(self, value: str) -> str:
        """A text as it is."""

    def token(self, token_id: int) -> str:
        """The token with this id, also a control token, which no text is."""

    def any_text(self) -> str:
        """Any text."""

    def until(self, end: str, others: Sequence[str] = ()) -> str:
        """Any text that ends with `end`, and has neither that nor any of the others before."""

    def without(self, texts: Sequence[str]) -> str:
        """Any text that has none of these, where `until` one of them could stand as well."""

    def json(self, schema: Any) -> str:
        """A JSON value of a schema. Raises ValueError."""

    def regex(self, pattern: str) -> str:
        """What an expression matches as a whole. Raises ValueError."""

    def grammar(self, source: str) -> str:
        """A sentence of a client's grammar. Raises ValueError."""


def tag_rule(tag: Mapping[str, Any], writer: TagWriter) -> str:
    """The rule of a structural tag: {"format": ...}, or the older {"structures": [...], "triggers": [...]}. Raises
    ValueError that says what is not supported."""
    if LEGACY in tag:
        structures, triggers = _list(tag, LEGACY), _texts(tag, "triggers")
        tags = [
            {
                "begin": _text(item, "begin"),
                "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
                "end": _text(item, "end"),
            }
            for item in structures
        ]
        return _triggered({"triggers": triggers, "tags": tags}, writer, 0)
    return _format(tag.get("format"), writer, 0)


def _format(spec: Any, writer: TagWriter, depth: int) -> str:
    """The rule of a format."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the structural tag is nested more than {MAX_DEPTH} levels deep")
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ValueError(
            f"type={kind!r:.60} of a structural tag is not supported; supported: {', '.join(sorted(_KINDS))}"
        )
    return make(spec, writer, depth)


def _json(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    if spec.get("style", "json") != "json":
        raise ValueError(f"style={spec['style']!r:.60} of json_schema is not supported; supported: json")
    return writer.json(spec.get("json_schema", {}))


def _regex(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    return writer.regex(_text(spec, "pattern"))


def _grammar(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    return writer.grammar(_text(spec, "grammar"))


def _sequence(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    return writer.rule(" ".join(_format(item, writer, depth + 1) for item in _list(spec, "elements")))


def _either(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    return writer.rule(" | ".join(_format(item, writer, depth + 1) for item in _list(spec, "elements")))


def _token(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    token = spec.get("token")
    if type(token) is not int or not 0 <= token < MAX_TOKEN_ID:
        raise ValueError("token of a structural tag must be the id of a token")
    return writer.rule(writer.token(token))


def _repeated(mark: str) -> Callable[[Mapping[str, Any], TagWriter, int], str]:
    def make(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
        return writer.rule(f"({_format(spec.get('content'), writer, depth + 1)}){mark}")

    return make


def _repeat(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    low, high = spec.get("min", 0), spec.get("max")
    numbers = [low] if high is None else [low, high]
    if not all(type(n) is int and 0 <= n <= MAX_REPEATS for n in numbers) or (high is not None and high < low):
        raise ValueError(f"min and max of repeat must be 0 to {MAX_REPEATS}, in this order")
    times = f"{{{low},{'' if high is None else high}}}"
    return writer.rule(f"({_format(spec.get('content'), writer, depth + 1)}){times}")


def _tag(spec: Mapping[str, Any], writer: TagWriter, depth: int, begun: str = "") -> str:
    """A stretch between its marks. `begun`: how much of the first one has come already."""
    begin, end, content = _text(spec, "begin"), _text(spec, "end"), spec.get("content")
    begin = begin.removeprefix(begun)
    if isinstance(content, Mapping) and content.get("type") == "any_text":
        if not end:
            raise ValueError("end of a tag with any_text must not be empty")
        return writer.rule(f"{writer.text(begin)} {writer.until(end)}")
    return writer.rule(f"{writer.text(begin)} {_format(content, writer, depth + 1)} {writer.text(end)}")


def _triggered(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    """Free text up to a trigger, which begins one of the tags; and so on."""
    triggers, tags = _texts(spec, "triggers"), _list(spec, "tags")
    if not triggers or not all(triggers):
        raise ValueError("triggers must be texts, none of them empty")
    alternatives = []
    for trigger in triggers:
        begun = [tag for tag in tags if isinstance(tag, Mapping) and _text(tag, "begin").startswith(trigger)]
        if begun:
            head = writer.until(trigger, [other for other in triggers if other != trigger])
            rest = writer.rule(" | ".join(_tag(tag, writer, depth + 1, trigger) for tag in begun))
            alternatives.append(f"{head} {rest}")
    if any(not isinstance(tag, Mapping) or not _text(tag, "begin").startswith(tuple(triggers)) for tag in tags):
        raise ValueError("every tag must begin with one of the triggers")
    if not alternatives:
        raise ValueError("tags must not be empty")
    one = writer.rule(" | ".join(alternatives))
    least = "+" if spec.get("at_least_one") else "*"
    if spec.get("stop_after_first"):
        return writer.rule(one if spec.get("at_least_one") else f"{one} | {writer.without(triggers)}")
    return writer.rule(f"{one}{least} {writer.without(triggers)}")


def _separated(spec: Mapping[str, Any], writer: TagWriter, depth: int) -> str:
    one = writer.rule(" | ".join(_tag(tag, writer, depth + 1) for tag in _list(spec, "tags")))
    separator = spec.get("separator")
    if isinstance(separator, Mapping):
        between = _format(separator, writer, depth + 1)
    else:
        between = writer.text(_text(spec, "separator"))
    several = one if spec.get("stop_after_first") else f"{one} ({between} {one})*"
    return writer.rule(several if spec.get("at_least_one") else f"({several})?")


_KINDS: Final[dict[str, Callable[[Mapping[str, Any], TagWriter, int], str]]] = {
    "any_text": lambda spec, writer, depth: writer.any_text(),
    "const_string": lambda spec, writer, depth: writer.rule(writer.text(_text(spec, "value"))),
    "grammar": _grammar,
    "json_schema": _json,
    "optional": _repeated("?"),
    "or": _either,
    "plus": _repeated("+"),
    "regex": _regex,
    "repeat": _repeat,
    "sequence": _sequence,
    "star": _repeated("*"),
    "tag": _tag,
    "tags_with_separator": _separated,
    "token": _token,
    "triggered_tags": _triggered,
}


def _text(spec: Mapping[str, Any], name: str) -> str:
    value = spec.get(name, "") if isinstance(spec, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"{name} of a structural tag must be a text")
    return value


def _list(spec: Mapping[str, Any], name: str) -> list[Any]:
    value = spec.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} of a structural tag must be a list that is not empty")
    return value


def _texts(spec: Mapping[str, Any], name: str) -> list[str]:
    values = _list(spec, name)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} of a structural tag must be a list of texts")
    return values
