"""How families of models write a message, as their chat templates show it: reasoning, content, and calls. Written apart
from the formats that read it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

BAR = "\uff5c"


class Call(NamedTuple):
    """A call that a model makes."""

    name: str
    arguments: Mapping[str, Any]


class Writer(NamedTuple):
    """A family: which parsers read it, and how it writes a message."""

    reasoning: str | None
    calls: str
    write: Callable[[str, str, Sequence[Call]], str]
    """Reasoning, content and calls become the text of a message."""


def shown(value: Any) -> str:
    """A value as elements hold it: a string as it is, others as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(given)}}}\n</tool_call>' for name, given in calls]
    return "\n".join([f"<think>\n{reasoning}\n</think>\n\n{content}", *parts])


def qwen3_coder(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = []
    for name, given in calls:
        values = "".join(f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in given.items())
        parts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join([f"<think>\n{reasoning}\n</think>\n\n{content}", *parts])


def glm(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = []
    for name, given in calls:
        pairs = given.items()
        values = "".join(f"<arg_key>{key}</arg_key><arg_value>{shown(value)}</arg_value>" for key, value in pairs)
        parts.append(f"<tool_call>{name}{values}</tool_call>")
    return "".join([f"<think>{reasoning}</think>{content}", *parts])


def deepseek_v31(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    begin, end, sep = (f"<{BAR}tool▁{name}{BAR}>" for name in ("call▁begin", "call▁end", "sep"))
    parts = "".join(f"{begin}{name}{sep}{as_json(given)}{end}" for name, given in calls)
    around = (f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>")
    return f"<think>{reasoning}</think>{content}" + (parts and around[0] + parts + around[1])


def deepseek_v32(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    mark = f"{BAR}DSML{BAR}"
    parts = []
    for name, given in calls:
        values = "".join(
            f'<{mark}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{shown(value)}'
            f"</{mark}parameter>\n"
            for key, value in given.items()
        )
        parts.append(f'<{mark}invoke name="{name}">\n{values}</{mark}invoke>\n')
    around = (f"\n\n<{mark}function_calls>\n", f"</{mark}function_calls>")
    return f"<think>{reasoning}</think>{content}" + ((parts and around[0] + "".join(parts) + around[1]) or "")


def kimi_k2(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
    return f"<think>{reasoning}</think>{content}" + (section if parts else "")


def harmony(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"]
    parts += [f"<|channel|>final<|message|>{content}<|return|>"] if content else []
    for name, given in calls:
        kind = "<|channel|>commentary <|constrain|>json<|message|>"
        parts.append(f" to=functions.{name}{kind}{as_json(given)}<|call|>")
    return "<|start|>assistant".join(parts)


def mistral(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls]
    return "".join([f"[THINK]{reasoning}[/THINK]{content}", *parts])


def llama4(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return content + (f"[{', '.join(parts)}]" if parts else "")


def llama3(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f'{{"name": "{name}", "parameters": {as_json(given)}}}' for name, given in calls]
    return content + "; ".join(parts)


def gemma4(reasoning: str, content: str, calls: Sequence[Call]) -> str:
    parts = [f"<|tool_call>call:{name}{_gemma_value(given)}<tool_call|>" for name, given in calls]
    return "".join([f"<|channel>thought\n{reasoning}\n<channel|>{content}", *parts])


def _gemma_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)


WRITERS = (
    Writer("qwen3", "hermes", hermes),
    Writer("qwen3", "qwen3_coder", qwen3_coder),
    Writer("glm45", "glm47", glm),
    Writer("deepseek_v3", "deepseek_v31", deepseek_v31),
    Writer("deepseek_v3", "deepseek_v32", deepseek_v32),
    Writer("kimi_k2", "kimi_k2", kimi_k2),
    Writer("openai_gptoss", "openai", harmony),
    Writer("mistral", "mistral", mistral),
    Writer(None, "llama4_pythonic", llama4),
    Writer(None, "llama3_json", llama3),
    Writer("gemma4", "gemma4", gemma4),
)
