"""Where a message begins: in its reasoning, in its content, or in either of them, by what the prompt leaves off with.
Does not know how the message goes on."""

from enum import Enum, auto

from pagemill.messages.structured_outputs import FreeStart
from pagemill.serve.parsers.format import Channels, Reasoning
from pagemill.serve.parsers.interface import MessageForm


class Opening(Enum):
    """What the first token of a message belongs to."""

    REASONING = auto()
    CONTENT = auto()
    EITHER = auto()
    """The model decides, by the mark that it writes first."""


def opening_of(reasoning: Reasoning, form: MessageForm) -> Opening:
    """Of the message that the prompt asks for, or has begun. A format whose reasoning needs no mark is EITHER too where
    the prompt has none."""
    if form.begun:
        if reasoning.end in form.begun:
            return Opening.CONTENT
        return Opening.REASONING if reasoning.begin in form.begun else Opening.EITHER
    end = form.prompt_end.rstrip()
    if any(end.endswith(mark) for mark in (reasoning.end.rstrip(), *reasoning.skips)):
        return Opening.CONTENT
    return Opening.REASONING if end.endswith(reasoning.begin.rstrip()) else Opening.EITHER


def reasoning_before(reasoning: Reasoning | Channels, form: MessageForm) -> FreeStart | None:
    """What a form of the content leaves free before it: the reasoning; None where the content begins at once."""
    if isinstance(reasoning, Channels):
        return _before_channel(reasoning, form)
    opening = opening_of(reasoning, form)
    if opening is Opening.CONTENT:
        return None
    asked = opening is Opening.EITHER and not reasoning.unasked
    ends = ((reasoning.end, *reasoning.skips),)
    return FreeStart(ends, reasoning.begin.strip() if asked else None, reasoning.trims)


def _before_channel(form: Channels, message: MessageForm) -> FreeStart | None:
    """Up to the body of the first message on the first channel of content."""
    begun = message.begun or message.prompt_end.rstrip()
    _, mark, header = begun.rpartition(form.channel)
    channel, body, _ = header.partition(form.body)
    if mark and body and channel.split()[:1] == [form.content[0]]:
        return None
    return FreeStart(((f"{form.channel}{form.content[0]}",), (form.body,)))
