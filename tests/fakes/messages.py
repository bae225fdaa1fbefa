"""What a parser makes of a text, put together again."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagemill.serve.parsers.interface import Delta, MessageParser


@dataclass
class Call:
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Message:
    """The concatenation of deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        if (call := delta.tool_call) is not None:
            if call.name is not None:
                assert call.number == len(self.calls)
                self.calls.append(Call(call.name))
            assert not self.calls[call.number].complete
            self.calls[call.number].arguments += call.arguments
            self.calls[call.number].complete = call.complete


def parse(parser: MessageParser, pieces: Sequence[str]) -> Message:
    """The message that a text in these pieces becomes."""
    message = Message()
    for piece in pieces:
        for delta in parser.feed(piece, ()):
            message.add(delta)
    for delta in parser.finish():
        message.add(delta)
    return message


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    bounds = [0, *sorted(place for place in places if place <= len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]
