"""What the scripts of the clients share: each runs its checks against one server, and prints a line of JSON for each.

Imported by scripts that run in the environment of a client: nothing but the standard library.
"""

import argparse
import json
import traceback
from collections.abc import Callable
from typing import NamedTuple

QUESTION = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Server(NamedTuple):
    """The server that is asked, and what it calls its model."""

    url: str
    model: str


Check = Callable[[Server], None]


def run(**checks: Check) -> int:
    """Run each check: `--url` and `--model` say against what. 0 when all pass; a check that raises does not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="without /v1")
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    server = Server(args.url, args.model)
    failed = 0
    for name, check in checks.items():
        try:
            check(server)
            reason = ""
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(json.dumps({"check": name, "reason": reason}), flush=True)
        failed += bool(reason)
    return 1 if failed else 0


def expect(condition: object, said: object) -> None:
    """Raises AssertionError with what was said unless the condition holds."""
    if not condition:
        raise AssertionError(f"this came instead: {said!r}")
