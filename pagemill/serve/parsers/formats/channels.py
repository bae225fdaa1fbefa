"""Formats with channels."""

from typing import Final

from pagemill.serve.parsers.format import Channels

HARMONY: Final = Channels(
    models="gpt-oss",
    header_begin="<|start|>",
    channel="<|channel|>",
    body="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    constraint="<|constrain|>",
    reasoning=("analysis",),
    content=("final", "commentary"),
    recipient=r"\bto=functions\.(?P<name>[^\s<]+)",
    thought="<|channel|>analysis<|message|>",
    thought_end="<|end|><|start|>assistant",
    call="<|channel|>commentary to=functions.",
    call_starts=("<|start|>assistant to=functions.",),
    call_rest="(?:json)?",
    tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
