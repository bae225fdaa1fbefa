"""Bodies of completions whose forms are made to be expensive: to read, translate, check, follow, or send."""

import json
from collections.abc import Callable
from typing import Any

NESTED = '{"type":"array","items":' * 60 + "{}" + "}" * 60


def body(prompt: Any, **fields: Any) -> bytes:
    """A completion request."""
    return json.dumps({"prompt": prompt, "max_tokens": 1} | fields, separators=(",", ":")).encode()


def doubled(times: int) -> str:
    """A grammar of 2 ** times letters."""
    return "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(times)) + f'\na{times}: "x"'


def pattern(expression: str) -> dict[str, Any]:
    """A schema of texts."""
    return {"type": "string", "pattern": expression}


def cycle(count: int) -> dict[str, Any]:
    """Definitions that refer to each other, and to all after them."""
    names = [f"d{i}" for i in range(count)]
    parts = {
        name: {"anyOf": [{"$ref": f"#/$defs/{names[(i + k) % count]}"} for k in range(1, 4)] + [{"type": "object"}]}
        for i, name in enumerate(names)
    }
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def properties(count: int) -> dict[str, Any]:
    """An object of texts and numbers that may all be missing."""
    return {"type": "object", "properties": {f"field {i}": {"type": ["string", "number"]} for i in range(count)}}


FORMS: dict[str, Callable[[], bytes]] = {
    "regex (a{1,300}){300}": lambda: body("a", guided_regex="(a{1,300}){300}"),
    "regex ((a{1,300}){300}){300}": lambda: body("a", guided_regex="((a{1,300}){300}){300}"),
    "regex (.*a){20}.{0,400}b": lambda: body("a", guided_regex="(.*a){20}.{0,400}b", max_tokens=40),
    "5,000 brackets in a regex": lambda: body("a", guided_regex="(" * 5000 + "a" + ")" * 5000),
    "a Lark rule doubled 60 times": lambda: body("a", guided_grammar=doubled(60)),
    "an ambiguous Lark grammar": lambda: body("a", guided_grammar="start: s\ns: s s | s s s | /a/", max_tokens=40),
    "a GBNF rule repeated 1,000,000 times": lambda: body("a", guided_grammar='root ::= "x"{1000000}'),
    "50 patterns in allOf": lambda: body("a", guided_json={"allOf": [pattern(f"a.{{0,100}}b{i}") for i in range(50)]}),
    "a schema nested 60 times": lambda: body("a", guided_json=json.loads(NESTED)),
    "a cycle of 200 references": lambda: body("a", guided_json=cycle(200)),
    "4,000 properties, none required": lambda: body("a", guided_json=properties(4000), max_tokens=40),
    "an enum of 20,000 texts": lambda: body("a", guided_json={"enum": [f"text {i}" for i in range(20_000)]}),
    "100,000 choices": lambda: body("a", guided_choice=[f"c{i}" for i in range(100_000)]),
    "a schema of 1 MB": lambda: body("a", guided_json=properties(20_000)),
    "a schema of 15 MB": lambda: body("a", guided_json=properties(300_000)),
    "1,000 prompts with a schema of 200 KB": lambda: body(["a"] * 1000, guided_json=properties(4000)),
}
"""What it is -> what makes the body."""
