"""Pieces of Lark grammars, as llguidance reads them: texts, regular expressions, and grammars that clients write."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pagemill.grammar.json_values import Budget

MAX_RULES: Final = 4096
ANY_TEXT: Final = r"/(.|\n)*/"

_LARK_START = re.compile(r"^\s*start\s*:", re.MULTILINE)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""What cannot stand as it is between the slashes of an expression, which is on one line."""
_GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


def text(value: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(value)


def choice_lark(choices: Sequence[str]) -> str:
    """A grammar of these texts."""
    return "start: " + " | ".join(map(text, choices))


def regex_lark(pattern: str) -> str:
    """A grammar of what a regular expression matches as a whole. Anchors around it say nothing new."""
    if "|" not in pattern:
        pattern = pattern.removeprefix("^")
        if pattern.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", pattern):
            pattern = pattern[:-1]
    escaped = re.sub(r"\\.|[/\n]", lambda match: _ESCAPED.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"start: /{escaped}/"


def grammar_lark(source: str) -> str:
    """A client's grammar as Lark: it may be in GBNF (`root ::= ...`). Raises ValueError for one that is neither."""
    if _GBNF_RULE.search(source):
        # Deferred: needed by this kind of grammar only.
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return gbnf_to_lark(source)
        except RecursionError:
            raise ValueError("the grammar is nested too deeply") from None
        except Exception as error:
            raise ValueError(f"the grammar is not valid GBNF: {str(error)[:200]}") from None
    if not _LARK_START.search(source):
        raise ValueError("the grammar has neither a rule `start:` (Lark) nor rules like `root ::= ...` (GBNF)")
    return source


class LarkWriter:
    """Implements `structural_tags.TagWriter`. Collects the rules of one grammar; each has a name of its own."""

    def __init__(self, json_options: Mapping[str, Any], schema: Callable[[Any], dict[str, Any]]) -> None:
        """`json_options`: of the library, for JSON inside; `schema`: makes a schema a supported one."""
        self._options = dict(json_options)
        self._schema = schema
        self._lines: list[str] = []
        self._budget = Budget(MAX_RULES)
        self._nested: list[dict[str, Any]] = []

    def rule(self, body: str, attributes: str = "") -> str:
        self._budget.spend()
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def text(self, value: str) -> str:
        return text(value)

    def token(self, token_ids: Sequence[int]) -> str:
        return f"<[{','.join(map(str, token_ids))}]>"

    def other_token(self, token_ids: Sequence[int]) -> str:
        return f"<[^{','.join(map(str, token_ids))}]>" if token_ids else "<[*]>"

    def any_text(self) -> str:
        return self.rule(ANY_TEXT)

    def until(self, ends: Sequence[str], others: Sequence[str] = (), excludes: Sequence[str] = ()) -> str:
        # The lexer takes what ends first.
        return self.rule(f"{self._text_without(excludes)} ({' | '.join(map(text, ends))})", "[lazy]")

    def without(self, others: Sequence[str], excludes: Sequence[str] = ()) -> str:
        return self.rule(self._text_without(excludes))

    def json(self, schema: Any) -> str:
        return self._refer(json_schema={**self._schema(schema), "x-guidance": self._options})

    def regex(self, pattern: str, ends: Sequence[str] = ()) -> str:
        if not ends:
            return self._refer(lark_grammar=regex_lark(pattern))
        # One lexeme: the lexer would not give back what the expression took.
        lines = [regex_lark(pattern).replace("start: ", "PATTERN: ", 1), f"ENDS: {' | '.join(map(text, ends))}"]
        return self._refer(lark_grammar="\n".join(["start: WHOLE", "WHOLE: PATTERN ENDS", *lines]))

    def grammar(self, source: str) -> str:
        return self._refer(lark_grammar=grammar_lark(source))

    def source(self, start: str) -> dict[str, Any]:
        """All of it, as the library reads it."""
        lark = "\n".join([f"start: {start}", *self._lines])
        return {"grammars": [{"name": "tags", "lark_grammar": lark}, *self._nested]}

    def _text_without(self, excludes: Sequence[str]) -> str:
        if not excludes:
            return ANY_TEXT
        self._budget.spend(len(excludes))
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(map(text, excludes))}) {ANY_TEXT})")
        return name

    def _refer(self, **content: Any) -> str:
        name = f"g{len(self._nested)}"
        self._nested.append({"name": name, **content})
        return f"@{name}"
