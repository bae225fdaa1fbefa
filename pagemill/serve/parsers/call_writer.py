"""`CallWriter`: a format of calls as the form that an output is held to, in terms of a structural tag. Does not know
when outputs are held to it, nor what follows them."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from pagemill.serve.parsers.argument_writer import element_arguments, notation_arguments
from pagemill.serve.parsers.call_spec import Function, Item, Marks, Spec, after_triggers, either, joined, json_arguments
from pagemill.serve.parsers.format import Calls, Channels, ElementCall, Head, JsonCall, NamedCall, NotationCall
from pagemill.serve.parsers.marks import HeadFound, head_reader

_GAP: Final[Spec] = {"type": "regex", "pattern": r"[ \n]{0,2}"}
_NUMBER: Final[Spec] = {"type": "regex", "pattern": "[0-9]{1,3}"}


class Triggered(NamedTuple):
    """What begins calls in a text that is free otherwise."""

    form: Spec
    """Of the calls, from a trigger on. Text may stand before it: part of a token."""
    triggers: tuple[bytes, ...]
    """Each begins them anywhere; control tokens are named after CONTROL."""
    first_triggers: tuple[bytes, ...]
    """Each begins them where nothing but white space has come."""


class CallWriter:
    """Writes calls in one format. Raises RequestError, from any method, for a function whose arguments cannot be held
    to its schema."""

    def __init__(self, calls: Calls, token_of: Callable[[str], int | None]) -> None:
        """`token_of`: the id of the control token of this name; None: there is none."""
        self._calls = calls
        self._marks = Marks(_marks_of(calls), token_of)
        written = calls.written
        self._written = next((one for one in written if all(mark in self._marks for mark in one.needs)), written[-1])
        self._form = calls.form[self._written.form]

    def can_name(self, name: str) -> bool:
        """Whether a call of this function can be told from its text."""
        if isinstance(self._form, JsonCall):
            return True
        head = self._form.head
        text = f"{head.start}{_shown(head, name, '1')}{head.end[0]}"
        found = head_reader(head).read(text, 0)
        return isinstance(found, HeadFound) and found.name == name

    def whole(self, functions: Sequence[Function], several: bool) -> Spec:
        """Calls of these functions and nothing else: one, or at least one."""
        return self._sequence([self._written.begin, *self._list(functions, several), self._written.end])

    def triggered(self, functions: Sequence[Function], several: bool) -> Triggered:
        """The same in a text that is free before."""
        written = self._written
        tags: dict[str, Spec] = {}
        for mark in self._calls.begin:
            rest = written.begin.removeprefix(self._calls.begin[0]).lstrip()
            tags[mark] = self._sequence([_GAP, rest, *self._list(functions, several), written.end])
        if self._calls.bare and not isinstance(self._form, JsonCall):
            start = self._form.head.start
            tags[start] = self._sequence([self._calls_of(functions, start), *self._more(functions, several)])
        firsts: dict[str, Spec] = {}
        for start in self._calls.starts:
            lead = "" if isinstance(self._form, JsonCall) and start == "{" else start
            for function in functions:
                named = self._named(function.name)
                first = self._calls_of([function], named)
                firsts[lead + named] = self._sequence([first, *self._more(functions, several)])
        return Triggered(
            self._tagged(tags | firsts),
            tuple(self._marks.trigger(text) for text in tags),
            tuple(self._marks.trigger(text) for text in firsts),
        )

    def _tagged(self, tags: Mapping[str, Spec]) -> Spec:
        """Any of several rests, each after its trigger."""
        texts = {trigger: self._marks.first_text(trigger) for trigger in tags}
        found = [self._sequence([trigger, rest]) for trigger, rest in tags.items() if not texts[trigger]]
        plain = [
            (texts[trigger], self._sequence([trigger.removeprefix(texts[trigger]), rest]))
            for trigger, rest in tags.items()
            if texts[trigger]
        ]
        found += [after_triggers(plain)] if plain else []
        return either(found)

    def _list(self, functions: Sequence[Function], several: bool) -> list[Item]:
        call = self._calls_of(functions)
        if not several or self._written.between is None:
            return [call]
        tag = {"begin": "", "content": call, "end": ""}
        separator = self._sequence([self._written.between])
        return [{"type": "tags_with_separator", "tags": [tag], "separator": separator, "at_least_one": True}]

    def _more(self, functions: Sequence[Function], several: bool) -> list[Item]:
        """What may follow the first call."""
        if not several or self._written.between is None:
            return [self._written.end]
        more = self._sequence([self._written.between, self._calls_of(functions)])
        return [{"type": "star", "content": more}, self._written.end]

    def _calls_of(self, functions: Sequence[Function], skip: str = "") -> Spec:
        """A call of any of these functions. `skip`: how much of it has been written."""
        return either([self._call(function, skip) for function in functions])

    def _call(self, function: Function, skip: str) -> Spec:
        items = self._items(function)
        if skip and isinstance(items[0], str):
            items[0] = items[0].removeprefix(skip)
        return self._sequence(items)

    def _named(self, name: str) -> str:
        """The beginning of a call, up to the name."""
        if isinstance(self._form, JsonCall):
            return f'{{"{self._form.name}": {_json(name)}'
        return f"{self._form.head.start}{_shown(self._form.head, name, '')}{self._form.head.end[0]}"

    def _items(self, function: Function) -> list[Item]:
        """A call, piece by piece; texts are joined."""
        form = self._form
        match form:
            case JsonCall():
                lead: list[Item] = ["{", {"type": "regex", "pattern": form.lead}] if form.lead else ["{"]
                named = f'"{form.name}": {_json(function.name)}, "{form.arguments[0]}": '
                return joined([*lead, named, json_arguments(function), "}"])
            case NamedCall():
                return joined([*self._head(form.head, function.name), json_arguments(function)])
            case ElementCall():
                arguments = element_arguments(form, function, self._marks, self._head)
                return joined([*self._head(form.head, function.name), *arguments, form.end])
            case NotationCall():
                arguments = notation_arguments(form, function, self._marks)
                return joined([*self._head(form.head, function.name), *arguments, form.end])

    def _head(self, head: Head, name: str, kind: str = "string") -> list[Item]:
        """What names a call, or an argument of this type."""
        before, number, after = _shown(head, name, "\0", kind).partition("\0")
        items: list[Item] = [f"{head.start}{before}", *([_NUMBER] if number else []), f"{after}{head.end[0]}"]
        return items

    def _sequence(self, items: Sequence[Item]) -> Spec:
        return self._marks.sequence(items)


class ChannelWriter:
    """Writes calls in a format of channels: one call in a message, as the reasoning before it is."""

    def __init__(self, channels: Channels, token_of: Callable[[str], int | None]) -> None:
        """`token_of`: the id of the control token of this name; None: there is none."""
        self._channels = channels
        self._marks = Marks(channels.tokens, token_of)

    def can_name(self, name: str) -> bool:
        """Whether a call of this function can be told from its text."""
        found = re.search(self._channels.recipient, f"{self._channels.call}{name} ")
        return found is not None and found["name"] == name

    def whole(self, functions: Sequence[Function], several: bool) -> Spec:
        """A call of one of these functions, after reasoning perhaps."""
        given = self._channels
        thought = self._marks.sequence([given.thought, self._marks.until(given.ends[0])])
        before = self._marks.sequence([thought, given.thought_end.removeprefix(given.ends[0])])
        return self._marks.sequence([{"type": "optional", "content": before}, given.call, self._rest(functions)])

    def triggered(self, functions: Sequence[Function], several: bool) -> Triggered:
        """The same in a text that is free before."""
        given = self._channels
        starts = [given.call, *given.call_starts]
        first = [start.rpartition(" ")[2] for start in given.call_starts]
        rest = self._rest(functions)
        forms = [self._marks.sequence([start, rest]) for start in starts]
        forms.append(after_triggers([(text, rest) for text in first]))
        trigger = self._marks.trigger
        return Triggered(either(forms), tuple(map(trigger, starts)), tuple(map(trigger, first)))

    def _rest(self, functions: Sequence[Function]) -> Spec:
        given = self._channels
        mark = self._marks.sequence([given.constraint])
        kind: Spec = {"type": "regex", "pattern": given.call_rest}
        space: Spec = {"type": "regex", "pattern": " ?"}
        calls = []
        for function in functions:
            header: list[Item] = [function.name, space, {"type": "optional", "content": mark}, kind, given.body]
            calls.append(self._marks.sequence([*header, json_arguments(function)]))
        return either(calls)


def _marks_of(calls: Calls) -> list[str]:
    """All texts of a format that may be the names of control tokens."""
    found = [*calls.begin, *calls.end, *calls.between, *calls.tokens]
    for form in calls.form:
        if not isinstance(form, JsonCall):
            found += [form.head.start, *form.head.end]
        if isinstance(form, ElementCall):
            found += [form.argument.start, *form.argument.end, form.value_begin, form.value_end, form.end]
        if isinstance(form, NotationCall):
            found += form.quotes
    texts = [text for text in found if len(text) > 2]
    # A mark may be several tokens in a row, as in `<|action_start|><|plugin|>`.
    return texts + [part for text in texts for part in re.findall(r"<[^<>]+>", text)]


def _shown(head: Head, name: str, number: str, kind: str = "string") -> str:
    text = html.escape(name) if head.escaped else name
    values = {"{name}": text, "{number}": number, "{type}": kind, "{string}": "true" if kind == "string" else "false"}
    return re.sub(r"\{[a-z]+\}", lambda found: values[found[0]], head.written)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
