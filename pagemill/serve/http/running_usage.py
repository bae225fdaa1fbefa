"""`RunningUsage`: a stream whose every event has the token counts so far (`stream_options.continuous_usage_stats`).

Knows where an event has its counts, and nothing else of it.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.errors import ApiError
from pagemill.serve.http.generation import DeltaBuilder

_NONE = b'],"usage":null}\n\n'
"""The end of an event without counts. No text in an event has it: line breaks are escaped there."""
_encode = msgspec.json.encode


class RunningUsage:
    """The events of another builder that ends its streams with the counts. Implements `DeltaBuilder`."""

    def __init__(self, builder: DeltaBuilder) -> None:
        self.head = builder.head
        self.usage = builder.usage
        self._builder = builder

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """With the counts after this delta."""
        return self._counted(self._builder.events(prompt_index, completion, output))

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, piece by piece."""
        return map(self._counted, self._builder.parts(prompt_index, completion, output))

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """As it is."""
        return self._builder.choice(prompt_index, completion, output)

    def end(self) -> bytes:
        """As it is."""
        return self._builder.end()

    def failure(self, error: ApiError) -> bytes:
        """As it is."""
        return self._builder.failure(error)

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """As it is."""
        return self._builder.body(choices)

    def _counted(self, events: bytes) -> bytes:
        return events.replace(_NONE, b'],"usage":' + _encode(self.usage.to_json()) + b"}\n\n") if events else events
