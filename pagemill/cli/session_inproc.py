"""`InprocSession`: a model in this process, behind the same interface as a server.

Knows the asynchronous front end; knows nothing about how the engine was built.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence

from pagemill.cli.sampling_flags import Params
from pagemill.cli.session import Delta, Message, Usage
from pagemill.messages.outputs import RequestOutput
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import RequestOutputKind
from pagemill.serve.async_llm import AsyncLLM


class InprocSession:
    """Runs the engine's event loop while an answer is awaited, and only then; Ctrl-C cancels the wait."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self.model = model
        self._llm = llm
        self._runner = asyncio.Runner()

    def stream_chat(self, messages: Sequence[Message], params: Params) -> Generator[Delta, None, None]:
        text = self._llm.tokenizer.render_chat(messages)
        token_ids = self._llm.tokenizer.encode(text, add_special_tokens=False, rendered=True)
        return self._stream({"prompt_token_ids": token_ids}, params)

    def stream_completion(self, prompt: str, params: Params) -> Generator[Delta, None, None]:
        return self._stream({"prompt": prompt}, params)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._llm.shutdown())

    def _stream(self, prompt: Prompt, params: Params) -> Generator[Delta, None, None]:
        given = {"max_tokens": None, **params}
        sampling = self._llm.default_params.replace(**given, output_kind=RequestOutputKind.DELTA)
        outputs = _deltas(self._llm.generate(prompt, sampling))
        try:
            while (delta := self._runner.run(_next(outputs))) is not None:
                yield delta
        finally:
            self._runner.run(outputs.aclose())


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    """The next piece, None after the last (a coroutine cannot raise StopAsyncIteration)."""
    return await anext(deltas, None)


async def _deltas(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Delta, None]:
    """Pieces of text; the last one carries the usage."""
    num_tokens = 0
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            completion = output.outputs[0]
            num_tokens += len(completion.token_ids)
            usage = Usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)
            yield Delta(completion.text, completion.finish_reason, usage if output.finished else None)
