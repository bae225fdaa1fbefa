"""What taking a message apart costs: microseconds of CPU for each token, and how time grows with hostile text.

    .venv/bin/python benchmarks/tool_parsers.py [--hostile]

A token is 4 characters. Times are of this process's CPU, the best of several rounds, so that other work on the machine
shows little.
"""

import functools
import json
import sys
import time
from collections.abc import Callable

from pagemill.catalog.parsers import TOOL_PARSERS
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.interface import MessageForm

TOKEN_CHARS = 4
ROUNDS = 7
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    },
}
CODE = "".join(f"def step_{number}(x: int) -> int:\n    return x + {number}\n" for number in range(100))
PROSE = "The quick brown fox jumps over the lazy dog, and then it writes a long answer. " * 40
JSON_CALL = json.dumps({"name": "write_file", "arguments": {"path": "a.py", "content": CODE}})
ARGUMENTS = json.dumps({"path": "a.py", "content": CODE})
MESSAGES: dict[str, tuple[str | None, str, str]] = {
    "content only": ("qwen3", "hermes", PROSE),
    "reasoning, qwen3": ("qwen3", "hermes", f"<think>{PROSE}</think>Done."),
    "hermes": ("qwen3", "hermes", f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    "qwen3_coder": (
        "qwen3",
        "qwen3_coder",
        f"<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\n{CODE}\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "mistral": ("mistral", "mistral", f"[TOOL_CALLS]write_file[ARGS]{ARGUMENTS}"),
    "openai": (
        "openai_gptoss",
        "openai",
        f"<|channel|>analysis<|message|>{PROSE}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.write_file <|constrain|>json<|message|>{ARGUMENTS}",
    ),
    "gemma4": (
        "gemma4",
        "gemma4",
        f'<|tool_call>call:write_file{{path:<|"|>a.py<|"|>,content:<|"|>{CODE}<|"|>}}<tool_call|>',
    ),
    "llama4_pythonic": (None, "llama4_pythonic", f"[write_file(path='a.py', content={CODE!r})]"),
}
HOSTILE_CHARS = (50_000, 100_000, 200_000)


def cpu_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least CPU time that some work took."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def read(reasoning: str | None, calls: str, pieces: list[str]) -> int:
    """Parse a message in pieces; the number of its deltas."""
    parser = MessageParsers(ParserSettings(reasoning, calls)).make(MessageForm(tools=[TOOL]))
    if parser is None:
        return 0
    count = sum(len(parser.feed(piece, (1,))) for piece in pieces)
    return count + len(parser.finish())


def cut(text: str, size: int) -> list[str]:
    """A text in pieces of a size."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def growth(size: int) -> tuple[float, str]:
    """Of hostile texts of this many characters, one at a time, the one that takes longest: seconds, and which."""
    worst = (0.0, "")
    for name in sorted(set(TOOL_PARSERS)):
        marks = ParserSettings(None, name).markers
        for unit in [*sorted(marks), *(f'{mark}{{"a": "' for mark in marks), *(mark + " " * 60 for mark in marks)]:
            pieces = list((unit * (size // len(unit) + 1))[:size])
            seconds = cpu_seconds(functools.partial(read, "qwen3", name, pieces), 1)
            worst = max(worst, (seconds, f"{name}, {unit.strip()!r} again and again"))
    return worst


def main() -> None:
    """Print a line for each message, and the growth."""
    print(f"{'message':24} {'tokens':>7} {'us/token':>9}")
    for shown, (reasoning, calls, text) in MESSAGES.items():
        pieces = cut(text, TOKEN_CHARS)
        seconds = cpu_seconds(functools.partial(read, reasoning, calls, pieces))
        print(f"{shown:24} {len(pieces):7} {seconds / len(pieces) * 1e6:9.2f}")
    for size in HOSTILE_CHARS if "--hostile" in sys.argv else ():
        seconds, text = growth(size)
        print(f"{size:9} characters, one at a time: at most {seconds:.2f} s ({text})")


if __name__ == "__main__":
    main()
