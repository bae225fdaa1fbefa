"""`ebnf_of`: the form of an output as an EBNF grammar, whatever its kind. Knows no library."""

import re
from collections.abc import Sequence
from typing import Any, Final

from pagemill.grammar.ebnf.schemas import JsonRules
from pagemill.grammar.ebnf.writer import EMPTY, EbnfWriter, any_text, text
from pagemill.grammar.interface import Form
from pagemill.grammar.regexes import whole
from pagemill.grammar.structural_tags import tag_rule
from pagemill.messages.structured_outputs import FreeStart

BOUNDED_GAP: Final = r"\n?[ ]{0,40}"
_GBNF_TOKENS: Final = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<comment>#[^\n]*)|(?P<name>[A-Za-z_][\w-]*)'
)
_GBNF_RULE: Final = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)[ \t]*::=", re.MULTILINE)


def ebnf_of(form: Form) -> str:
    """A grammar whose rule `root` is the form. Raises ValueError that says what is not supported."""
    writer = _FormWriter(form)
    match form.kind:
        case "json":
            start = writer.supported_json(form.content)
        case "regex":
            start = writer.regex(form.content)
        case "choice":
            start = writer.rule(" | ".join(map(text, form.content)))
        case "grammar":
            start = writer.grammar(form.content)
        case _:
            start = tag_rule(form.content, writer, form.token_of)
    if form.start is not None:
        start = f"{_before(form.start, writer)} {start}"
    return writer.source(start)


def _before(free: FreeStart, writer: EbnfWriter) -> str:
    parts = []
    for ends in free.ends:
        parts.append(writer.until(ends))
    gap = [r'"\n"? "\n"?'] if free.gap else []
    if free.begin is None:
        return " ".join(parts + gap)
    return f"({' '.join([text(free.begin), *parts, *gap])})?"


class _FormWriter(EbnfWriter):
    """Writes structural tags as EBNF rules: implements `structural_tags.TagWriter`."""

    def __init__(self, form: Form) -> None:
        super().__init__(form.budget)
        self._form = form
        self._num_grammars = 0
        self._client_rules: list[str] = []

    def text(self, value: str) -> str:
        return text(value)

    def token(self, token_ids: Sequence[int]) -> str:
        return f"Token({', '.join(map(str, token_ids))})"

    def other_token(self, token_ids: Sequence[int]) -> str:
        found = ", ".join(map(str, token_ids))
        return f"ExcludeToken({found})" if found else "(Token(0) | ExcludeToken(0))"

    def any_text(self) -> str:
        return self.rule(any_text())

    def json(self, schema: Any) -> str:
        return self.supported_json(self._form.schema(schema))

    def supported_json(self, schema: Any) -> str:
        """A JSON value of a schema that was made a supported one."""
        options = self._form.options
        gap = EMPTY if options.compact else self.expression(whole(options.whitespace or BOUNDED_GAP))
        if options.whitespace == "":
            gap = EMPTY
        return JsonRules(self, gap, schema, self._form.budget).rule(schema)

    def regex(self, pattern: str, ends: Sequence[str] = ()) -> str:
        body = self.expression(whole(pattern))
        return self.rule(f"{self.rule(body)} ({' | '.join(map(text, ends))})" if ends else body)

    def grammar(self, source: str) -> str:
        """Its rules get names of their own."""
        if "root" not in _GBNF_RULE.findall(source):
            raise ValueError("the grammar has no rule `root ::= ...`: this server reads grammars in GBNF only")
        self._num_grammars += 1
        prefix = f"g{self._num_grammars}_"
        self._client_rules.append(
            _GBNF_TOKENS.sub(lambda found: f"{prefix}{found[0]}" if found["name"] else found[0], source)
        )
        return f"{prefix}root"

    def source(self, start: str) -> str:
        return "\n".join([super().source(start), *self._client_rules])
