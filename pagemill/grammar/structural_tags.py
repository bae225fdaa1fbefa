"""Structural tags: free text, and stretches of it that must have a form. Knows nothing about tokens but their ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from pagemill.grammar.json_values import Budget

MAX_DEPTH: Final = 48
MAX_FORMATS: Final = 20_000
MAX_REPEATS: Final = 1024
MAX_TOKEN_ID: Final = 2**31
MAX_TOKEN_IDS: Final = 4096
LEGACY: Final = "structures"
PARAMETER_END: Final = "</parameter>"
_OF_PARAMETERS: Final = "type properties required additionalProperties description title $schema $defs definitions"
TokenOf = Callable[[str], int | None]
"""The id of the token that has this name or text by itself; None: there is none."""


class TagWriter(Protocol):
    """Writes the rules of one grammar. What it returns are names of rules, and texts: they go into bodies of rules with
    blanks between them, `|`, `*`, `+`, `?`, `{m,n}` and parentheses."""

    def rule(self, body: str) -> str:
        """Add a rule."""

    def text(self, value: str) -> str:
        """A text as it is."""

    def token(self, token_ids: Sequence[int]) -> str:
        """One of these tokens, also a control token, which no text is."""

    def other_token(self, token_ids: Sequence[int]) -> str:
        """A token that is none of these, also a control token, but none that ends an output."""

    def any_text(self) -> str:
        """Any text."""

    def until(self, ends: Sequence[str], others: Sequence[str] = (), excludes: Sequence[str] = ()) -> str:
        """Any text that ends with one of `ends`, and has neither them nor any of `others` before, where `until` one of
        those could stand as well; nor any of `excludes`."""

    def without(self, others: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Any text that has none of these, where `until` one of `others` could stand as well."""

    def json(self, schema: Any) -> str:
        """A JSON value of a schema. Raises ValueError."""

    def regex(self, pattern: str, ends: Sequence[str] = ()) -> str:
        """What an expression matches as a whole, and one of `ends`, if there are any. Raises ValueError."""

    def grammar(self, source: str) -> str:
        """A sentence of a client's grammar. Raises ValueError."""


@dataclass(frozen=True)
class _Place:
    """Where in a tag a format stands."""

    writer: TagWriter
    token_of: TokenOf
    budget: Budget
    """Of formats: one is written again for each text that may end it."""
    depth: int = 0
    ends: tuple[str, ...] | None = None
    """Texts of which one follows. It is written with the format, as free text ends where it comes. Empty: what follows
    is no fixed text; None: nothing does, or a token."""

    def inner(self, ends: tuple[str, ...] | None) -> "_Place":
        """Of a part of the format."""
        return replace(self, depth=self.depth + 1, ends=ends)

    def rule(self, body: str) -> str:
        """Of a format that does not need to know what follows."""
        return self.writer.rule(f"{body} {self.end}" if self.ends else body)

    @property
    def end(self) -> str:
        """What follows, as a part of a rule."""
        texts = [self.writer.text(end) for end in self.ends or ()]
        return texts[0] if len(texts) == 1 else f"({' | '.join(texts)})"

    def free(self, others: Sequence[str] = (), excludes: Sequence[str] = ()) -> str:
        """Free text, and what follows. `others`: texts that end it as well, in other rules."""
        if self.ends is None:
            return self.writer.without(others, excludes) if others or excludes else self.writer.any_text()
        if not self.ends:
            raise ValueError("free text must be followed by a fixed text, a tag, a token or nothing")
        return self.writer.until(self.ends, others, excludes)


def tag_rule(tag: Mapping[str, Any], writer: TagWriter, token_of: TokenOf = lambda text: None) -> str:
    """The rule of a structural tag: {"format": ...}, or the older {"structures": [...], "triggers": [...]}. Raises
    ValueError that says what is not supported."""
    at = _Place(writer, token_of, Budget(MAX_FORMATS))
    if LEGACY in tag:
        _check_names(tag, {LEGACY, "triggers"}, "a structural tag")
        structures, triggers = _list(tag, LEGACY), _texts(tag, "triggers")
        for item in structures:
            _check_names(item, {"begin", "schema", "end"}, LEGACY)
        tags = [
            {
                "begin": _text(item, "begin"),
                "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
                "end": _text(item, "end"),
            }
            for item in structures
        ]
        return _triggered({"triggers": triggers, "tags": tags}, at)
    _check_names(tag, {"format"}, "a structural tag")
    return _format(tag.get("format"), at)


def _format(spec: Any, at: _Place) -> str:
    """The rule of a format, and of what follows it."""
    if at.depth > MAX_DEPTH:
        raise ValueError(f"the structural tag is nested more than {MAX_DEPTH} levels deep")
    at.budget.spend()
    kind = _kind(spec)
    if kind not in _KINDS:
        raise ValueError(
            f"type={kind!r:.60} of a structural tag is not supported; supported: {', '.join(sorted(_KINDS))}"
        )
    make, names = _KINDS[kind]
    _check_names(spec, names.split(), kind)
    return make(spec, at)


def _kind(spec: Any) -> str:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    return kind if isinstance(kind, str) else repr(kind)[:60]


def _check_names(spec: Any, names: Any, what: str) -> None:
    """A field that is not known must ask for nothing."""
    if isinstance(spec, Mapping):
        for name, value in spec.items():
            if name != "type" and name not in names and value not in (None, False, []):
                raise ValueError(
                    f"{str(name)[:60]}={value!r:.60} of {what} is not supported; supported: {', '.join(sorted(names))}"
                )


def _any_text(spec: Mapping[str, Any], at: _Place) -> str:
    return at.free(excludes=_excludes(spec))


def _const(spec: Mapping[str, Any], at: _Place) -> str:
    return at.rule(at.writer.text(_text(spec, "value")))


def _json(spec: Mapping[str, Any], at: _Place) -> str:
    style = spec.get("style", "json")
    if style == "qwen_xml":
        return _parameters(spec, at)
    if style != "json":
        raise ValueError(f"style={style!r:.60} of json_schema is not supported; supported: json, qwen_xml")
    value = at.writer.json(spec.get("json_schema", {}))
    return at.rule(value) if at.ends else value


def _parameters(spec: Mapping[str, Any], at: _Place) -> str:
    """The properties of an object, each between marks of its own: texts as they are, all else as JSON."""
    schema = spec.get("json_schema")
    if not isinstance(schema, Mapping):
        raise ValueError("json_schema of style qwen_xml must be an object's schema")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("json_schema of style qwen_xml must have properties, and required names of them")
    unknown = {*schema}.difference(_OF_PARAMETERS.split())
    if unknown:
        raise ValueError(f"these keywords are not supported in style qwen_xml: {', '.join(sorted(unknown))[:200]}")
    missing = [name for name in required if name not in properties]
    if missing:
        raise ValueError(f"required={missing!r:.100} names no property")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    gap = at.writer.regex("[ \\n]{0,2}")
    parts = [gap]
    for name, value in properties.items():
        content = _parameter({**value, **shared} if isinstance(value, Mapping) else value)
        one = _tag({"begin": f"<parameter={name}>", "content": content, "end": PARAMETER_END}, at.inner(()))
        parts.append(f"{one} {gap}" if name in required else f"({one} {gap})?")
    return at.rule(" ".join(parts))


def _parameter(schema: Any) -> dict[str, Any]:
    """The format of a value."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}
        if isinstance(schema.get("pattern"), str):
            return {"type": "regex", "pattern": _found_anywhere(schema["pattern"])}
        unknown = {*schema} & {"minLength", "maxLength", "format", "not", "anyOf", "oneOf", "allOf"}
        if unknown:
            raise ValueError(f"{min(unknown)} of a string is not supported in style qwen_xml")
        return {"type": "any_text"}
    return {"type": "json_schema", "json_schema": schema}


def _found_anywhere(pattern: str) -> str:
    """The expression of texts in which another one matches, as JSON Schema means it."""
    if pattern.startswith("^") and pattern.endswith("$") and "|" not in pattern:
        return pattern
    return f"(.|\\n)*({pattern})(.|\\n)*"


def _regex(spec: Mapping[str, Any], at: _Place) -> str:
    return at.writer.regex(_text(spec, "pattern"), at.ends or ())


def _grammar(spec: Mapping[str, Any], at: _Place) -> str:
    found = at.writer.grammar(_text(spec, "grammar"))
    return at.rule(found) if at.ends else found


def _sequence(spec: Mapping[str, Any], at: _Place) -> str:
    """Free text ends where the text of the next element begins, which is then written with it."""
    elements = _list(spec, "elements")
    bodies: list[str] = []
    index = 0
    while index < len(elements):
        element, following = elements[index], elements[index + 1 : index + 2]
        starts = _starts(following[0]) if following and _is_open(element) else None
        if starts is None:
            by_token = bool(following) and _begins_with_token(following[0])
            place = at.inner((None if by_token else ()) if following else at.ends)
            bodies.append(_format(element, place))
            index += 1
            continue
        after = at.inner(() if index + 2 < len(elements) else at.ends)
        bodies.append(at.writer.rule(" | ".join(_up_to(element, start, rest, after) for start, rest in starts)))
        index += 2
    return at.writer.rule(" ".join(bodies))


def _up_to(element: Any, start: str, rest: Any, after: _Place) -> str:
    """An element, the text that ends it, and the rest of what this begins."""
    head = _format(element, replace(after, ends=(start,)))
    if rest is not None:
        return f"{head} {_format(rest, after)}"
    return f"{head} {after.end}" if after.ends else head


def _is_open(spec: Any) -> bool:
    """Whether a format may be longer or shorter where it stands before a text."""
    kind = _kind(spec)
    if kind in ("optional", "or", "sequence", "tag"):
        inside = spec.get("elements") if kind in ("or", "sequence") else [spec.get("content")]
        inside = inside if isinstance(inside, list) else []
        closed = kind == "tag" and spec.get("end", "") != ""
        return not closed and any(_is_open(item) for item in (inside[-1:] if kind == "sequence" else inside))
    return kind in ("any_text", "dispatch", "regex", "triggered_tags")


def _starts(spec: Any) -> list[tuple[str, Any]] | None:
    """The texts that a format begins with, and what follows each; None: it may begin otherwise."""
    match _kind(spec):
        case "const_string" if _text(spec, "value"):
            return [(spec["value"], None)]
        case "tag" if isinstance(begin := spec.get("begin"), str) and begin and spec.get("end", "") != "":
            return [(begin, {**spec, "begin": ""})]
        case "or":
            found: list[tuple[str, Any]] = []
            for item in _list(spec, "elements"):
                starts = None if _kind(item) == "or" else _starts(item)
                if starts is None:
                    return None
                found += starts
            return found
    return None


def _begins_with_token(spec: Any) -> bool:
    return _kind(spec) == "token" or (_kind(spec) == "tag" and isinstance(spec.get("begin"), Mapping))


def _either(spec: Mapping[str, Any], at: _Place) -> str:
    return at.writer.rule(" | ".join(_format(item, at.inner(at.ends)) for item in _list(spec, "elements")))


def _optional(spec: Mapping[str, Any], at: _Place) -> str:
    content = _format(spec.get("content"), at.inner(at.ends))
    return at.writer.rule(f"{content} | {at.end}" if at.ends else f"({content})?")


def _repeated(mark: str) -> "_Make":
    def make(spec: Mapping[str, Any], at: _Place) -> str:
        return at.rule(f"({_format(spec.get('content'), at.inner(()))}){mark}")

    return make


def _repeat(spec: Mapping[str, Any], at: _Place) -> str:
    low, high = spec.get("min", 0), spec.get("max")
    high = None if high == -1 else high
    numbers = [low] if high is None else [low, high]
    if not all(type(n) is int and 0 <= n <= MAX_REPEATS for n in numbers) or (high is not None and high < low):
        raise ValueError(f"min and max of repeat must be 0 to {MAX_REPEATS}, in this order; max=-1: without end")
    times = f"{{{low},{'' if high is None else high}}}"
    return at.rule(f"({_format(spec.get('content'), at.inner(()))}){times}")


def _token(spec: Mapping[str, Any], at: _Place) -> str:
    return at.rule(at.writer.token([_token_id(spec.get("token"), "token", at)]))


def _exclude_token(spec: Mapping[str, Any], at: _Place) -> str:
    return at.rule(at.writer.other_token(_token_ids(spec, "exclude_tokens", at)))


def _any_tokens(spec: Mapping[str, Any], at: _Place) -> str:
    most = spec.get("max_tokens")
    if most is not None and (type(most) is not int or not 0 <= most <= MAX_REPEATS):
        raise ValueError(f"max_tokens of any_tokens must be 0 to {MAX_REPEATS}")
    _check_tokens_may_stand(at)
    one = at.writer.other_token(_token_ids(spec, "exclude_tokens", at))
    return at.rule(f"({one}){'*' if most is None else f'{{0,{most}}}'}")


def _check_tokens_may_stand(at: _Place) -> None:
    if at.ends is not None:
        raise ValueError("any tokens must be followed by a token or nothing")


def _tag(spec: Mapping[str, Any], at: _Place, begun: str | None = None) -> str:
    """A stretch between its marks. `begun`: how much of the first one has come already; None: nothing."""
    begin, end, content = spec.get("begin", ""), spec.get("end", ""), spec.get("content")
    if isinstance(begin, Mapping):
        start = _mark(begin, at) if begun is None else ""
    else:
        start = at.writer.text(_text(spec, "begin").removeprefix(begun or ""))
    if isinstance(end, Mapping):
        return at.rule(f"{start} {_format(content, at.inner(None))} {_mark(end, at)}")
    ends = tuple(_texts(spec, "end")) if isinstance(end, list) else (_text(spec, "end"),)
    if ends == ("",):
        return at.writer.rule(f"{start} {_format(content, at.inner(at.ends))}")
    if "" in ends:
        raise ValueError("end of a tag must not have an empty text beside others")
    return at.rule(f"{start} {_format(content, at.inner(ends))}")


def _mark(spec: Mapping[str, Any], at: _Place) -> str:
    if _kind(spec) != "token":
        raise ValueError(f"begin and end of a tag must be texts or of type token, not {_kind(spec)}")
    return _format(spec, at.inner(None))


def _tags(spec: Mapping[str, Any]) -> list[Any]:
    """Those of a format that has several."""
    tags = _list(spec, "tags")
    for tag in tags:
        if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
            raise ValueError(f"tags of a structural tag must be objects of type tag, not {tag!r:.60}")
        _check_names(tag, _TAG_FIELDS.split(), "tag")
    return tags


def _triggered(spec: Mapping[str, Any], at: _Place) -> str:
    """Free text up to a trigger, which begins one of the tags; and so on."""
    triggers, tags = _texts(spec, "triggers"), _tags(spec)
    begins = [_text(tag, "begin") for tag in tags]
    if not all(begin.startswith(tuple(triggers)) for begin in begins):
        raise ValueError("every tag must begin with one of the triggers")
    place = _of_rest(spec.get("stop_after_first"), at)
    rests = {
        trigger: [
            _tag(tag, place, trigger) for tag, begin in zip(tags, begins, strict=True) if begin.startswith(trigger)
        ]
        for trigger in triggers
    }
    return _scattered(rests, at, spec, _excludes(spec))


def _dispatch(spec: Mapping[str, Any], at: _Place) -> str:
    """Free text up to a pattern, which its format follows; and so on, unless `loop` is false."""
    once = spec.get("loop", True) is False
    place = _of_rest(once, at)
    rests: dict[str, list[str]] = {}
    for rule in _list(spec, "rules"):
        pattern, content = _pair(rule)
        if not isinstance(pattern, str):
            raise ValueError("rules of dispatch must be pairs of a text and a format")
        rests.setdefault(pattern, []).append(_format(content, place))
    return _scattered(rests, at, {"stop_after_first": once}, _excludes(spec))


def _of_rest(once: Any, at: _Place) -> _Place:
    """Where what follows a trigger stands. `once`: nothing but what follows the whole comes then."""
    return at.inner(at.ends if once else ())


def _scattered(rests: Mapping[str, list[str]], at: _Place, spec: Mapping[str, Any], excludes: Sequence[str]) -> str:
    """Free text, in which triggers are followed by one of their rests."""
    if not all(rests):
        raise ValueError("triggers must be texts, none of them empty")
    alternatives = []
    for trigger, found in rests.items():
        if found:
            head = at.writer.until((trigger,), [other for other in rests if other != trigger], excludes)
            alternatives.append(f"{head} {at.writer.rule(' | '.join(found))}")
    one = at.writer.rule(" | ".join(alternatives))
    if spec.get("stop_after_first"):
        return one if spec.get("at_least_one") else at.writer.rule(f"{one} | {at.free([*rests], excludes)}")
    least = "+" if spec.get("at_least_one") else "*"
    return at.writer.rule(f"{one}{least} {at.free([*rests], excludes)}")


def _token_triggered(spec: Mapping[str, Any], at: _Place) -> str:
    """Any tokens up to a trigger, which begins one of the tags; and so on."""
    triggers, tags = _token_ids(spec, "trigger_tokens", at), _tags(spec)
    rests: dict[int, list[str]] = {trigger: [] for trigger in triggers}
    place = _of_rest(spec.get("stop_after_first"), at)
    for tag in tags:
        begin = tag.get("begin")
        token = _token_id(begin.get("token"), "token", at) if _kind(begin) == "token" else None
        if token not in rests:
            raise ValueError("every tag must begin with a token that is one of trigger_tokens")
        rests[token].append(_tag(tag, place, ""))
    return _scattered_tokens(rests, at, spec, _token_ids(spec, "exclude_tokens", at))


def _token_dispatch(spec: Mapping[str, Any], at: _Place) -> str:
    """Any tokens up to one that its format follows; and so on, unless `loop` is false."""
    once = spec.get("loop", True) is False
    place = _of_rest(once, at)
    rests: dict[int, list[str]] = {}
    for rule in _list(spec, "rules"):
        token, content = _pair(rule)
        rests.setdefault(_token_id(token, "rules", at), []).append(_format(content, place))
    return _scattered_tokens(rests, at, {"stop_after_first": once}, _token_ids(spec, "exclude_tokens", at))


def _scattered_tokens(
    rests: Mapping[int, list[str]], at: _Place, spec: Mapping[str, Any], excludes: Sequence[int]
) -> str:
    """Any tokens, in which triggers are followed by one of their rests."""
    _check_tokens_may_stand(at)
    free = at.writer.rule(f"({at.writer.other_token([*rests, *excludes])})*")
    found = {token: bodies for token, bodies in rests.items() if bodies}
    one = at.writer.rule(
        " | ".join(
            f"{free} {at.writer.token([token])} {at.writer.rule(' | '.join(bodies))}" for token, bodies in found.items()
        )
    )
    if spec.get("stop_after_first"):
        return one if spec.get("at_least_one") else at.writer.rule(f"{one} | {free}")
    return at.writer.rule(f"{one}{'+' if spec.get('at_least_one') else '*'} {free}")


def _separated(spec: Mapping[str, Any], at: _Place) -> str:
    one = at.writer.rule(" | ".join(_tag(tag, at.inner(())) for tag in _tags(spec)))
    separator = spec.get("separator")
    if isinstance(separator, Mapping):
        between = _format(separator, at.inner(()))
    else:
        between = at.writer.text(_text(spec, "separator"))
    several = one if spec.get("stop_after_first") else f"{one} ({between} {one})*"
    return at.rule(several if spec.get("at_least_one") else f"({several})?")


_Make = Callable[[Mapping[str, Any], _Place], str]
_TAG_FIELDS: Final = "begin content end"
_KINDS: Final[dict[str, tuple[_Make, str]]] = {
    "any_text": (_any_text, "excludes"),
    "any_tokens": (_any_tokens, "exclude_tokens max_tokens"),
    "const_string": (_const, "value"),
    "dispatch": (_dispatch, "rules loop excludes"),
    "exclude_token": (_exclude_token, "exclude_tokens"),
    "grammar": (_grammar, "grammar"),
    "json_schema": (_json, "json_schema style"),
    "optional": (_optional, "content"),
    "or": (_either, "elements"),
    "plus": (_repeated("+"), "content"),
    "qwen_xml_parameter": (_parameters, "json_schema"),
    "regex": (_regex, "pattern"),
    "repeat": (_repeat, "content min max"),
    "sequence": (_sequence, "elements"),
    "star": (_repeated("*"), "content"),
    "tag": (_tag, _TAG_FIELDS),
    "tags_with_separator": (_separated, "tags separator at_least_one stop_after_first"),
    "token": (_token, "token"),
    "token_dispatch": (_token_dispatch, "rules loop exclude_tokens"),
    "token_triggered_tags": (
        _token_triggered,
        "trigger_tokens tags exclude_tokens at_least_one stop_after_first",
    ),
    "triggered_tags": (_triggered, "triggers tags at_least_one stop_after_first excludes"),
}
"""Type -> what writes it, and its fields."""


def _pair(rule: Any) -> tuple[Any, Any]:
    if not isinstance(rule, list | tuple) or len(rule) != 2:
        raise ValueError("rules of a structural tag must be pairs of what begins a stretch and a format")
    return rule[0], rule[1]


def _token_id(value: Any, name: str, at: _Place) -> int:
    if isinstance(value, str) and value:
        found = at.token_of(value)
        if found is None:
            raise ValueError(f"{name} of a structural tag names {value!r:.60}, which is no token by itself")
        return found
    if type(value) is not int or not 0 <= value < MAX_TOKEN_ID:
        raise ValueError(f"{name} of a structural tag must be the id or the text of a token, not {value!r:.60}")
    return value


def _token_ids(spec: Mapping[str, Any], name: str, at: _Place) -> list[int]:
    values = spec.get(name) or []
    if not isinstance(values, list) or len(values) > MAX_TOKEN_IDS:
        raise ValueError(f"{name} of a structural tag must be a list of at most {MAX_TOKEN_IDS} ids of tokens")
    return [_token_id(value, name, at) for value in values]


def _excludes(spec: Mapping[str, Any]) -> list[str]:
    found = _texts(spec, "excludes") if spec.get("excludes") else []
    if not all(found):
        raise ValueError("excludes must be texts, none of them empty")
    return found


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
