"""`InprocSession`: a model in this process, behind the same interface as a server.

Knows the asynchronous front end; knows nothing about how the engine was built.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from typing import Any, Protocol

from pagemill.cli.sampling_flags import Params
from pagemill.cli.session import Delta, Message, Usage
from pagemill.messages.outputs import RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.tokenizers.interface import Tokenizer


class AsyncModel(Protocol):
    """What this needs of AsyncLLM."""

    def generate(self, prompt: Any, sampling_params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Outputs of one request; closing the generator aborts it."""


class Launched(Protocol):
    """What this needs of a launched engine."""

    @property
    def llm(self) -> AsyncModel:
        """The asynchronous front end."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling defaults that come with the model; empty when they are not to be used."""

    def close(self) -> None:
        """Shut the engine down."""


class InprocSession:
    """Runs the engine's event loop while an answer is awaited, and only then; Ctrl-C cancels the wait."""

    def __init__(self, launched: Launched, model: str) -> None:
        self.model = model
        self._launched = launched
        self._runner = asyncio.Runner()

    def stream_chat(self, messages: Sequence[Message], params: Params) -> Generator[Delta, None, None]:
        text = self._launched.tokenizer.render_chat(messages)
        token_ids = self._launched.tokenizer.encode(text, add_special_tokens=False)
        return self._stream({"prompt_token_ids": token_ids}, params)

    def stream_completion(self, prompt: str, params: Params) -> Generator[Delta, None, None]:
        return self._stream({"prompt": prompt}, params)

    def close(self) -> None:
        self._launched.close()
        self._runner.close()

    def _stream(self, prompt: Mapping[str, Any], params: Params) -> Generator[Delta, None, None]:
        given = {"max_tokens": None, **self._launched.generation_defaults, **params}
        sampling = SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
        outputs = _deltas(self._launched.llm.generate(prompt, sampling))
        try:
            while (delta := self._runner.run(_next(outputs))) is not None:
                yield delta
        finally:
            self._runner.run(outputs.aclose())


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    """The next piece, None after the last (a coroutine cannot raise StopAsyncIteration)."""
    return await anext(deltas, None)


async def _deltas(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[Delta, None]:
    """Pieces of text; the last one carries the usage."""
    num_tokens = 0
    try:
        async for output in outputs:
            completion = output.outputs[0]
            num_tokens += len(completion.token_ids)
            usage = Usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)
            yield Delta(completion.text, completion.finish_reason, usage if output.finished else None)
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
