"""An AsyncLLM that says what it was told to. Computes nothing."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams


class FakeTokenizer:
    """One token per character."""

    def render_chat(self, messages: Any, **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        assert not add_special_tokens, "a rendered template has its special tokens"
        return [ord(char) for char in text]


class FakeLLM:
    """Streams `pieces`, one token each. Requests are noted; `num_closed` counts generators that were ended."""

    def __init__(self, pieces: tuple[str, ...] = ("one ", "two ", "three"), **default_params: Any) -> None:
        self.pieces = pieces
        self.tokenizer = FakeTokenizer()
        self.default_params = SamplingParams(**default_params)
        self.is_shut_down = False
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.num_closed = 0
        self.before_piece: Any = None
        """Called with the number of each piece."""

    async def generate(self, prompt: Any, sampling_params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        self.requests.append((prompt, sampling_params))
        prompt_token_ids = prompt.get("prompt_token_ids", [1, 2, 3])
        try:
            for number, text in enumerate(self.pieces):
                if self.before_piece is not None:
                    self.before_piece(number)
                await asyncio.sleep(0.001)
                last = number == len(self.pieces) - 1
                completion = CompletionOutput(0, text, [number], "stop" if last else None)
                yield RequestOutput("r", None, prompt_token_ids, [completion], last, num_cached_tokens=2)
        finally:
            self.num_closed += 1

    async def shutdown(self) -> None:
        self.is_shut_down = True
