"""POST /v1/completions: prompts in, their continuations out."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import ApiError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import COMPLETIONS
from pagemill.serve.http.responses import ResponseHead, Usage, broken_off, now
from pagemill.serve.http.running_usage import RunningUsage
from pagemill.serve.http.schemas.answers import Completion
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.state import services
from pagemill.serve.http.token_details import TextLogprobs, TokenDetails, prompt_logprobs, token_ids

router = APIRouter()
_encode = msgspec.json.encode


@router.post(
    "/v1/completions",
    response_model=None,
    openapi_extra=describes(Completion, body=CompletionBody, event=Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue texts. Every prompt is checked before any runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    form, prepared, echoes = await here.intake.prepare(COMPLETIONS, request)
    head = ResponseHead(f"cmpl-{request.scope['request_id']}", here.model.name, now())
    usage = Usage(prepared, here.engine.block_size)
    deltas = CompletionDeltas(head, usage, form.with_usage, form.num_per_prompt, echoes, form.tokens)
    return await answer(
        request,
        form,
        Generation(here.engine, prepared, RunningUsage(deltas) if form.with_running_usage else deltas, form.beam),
    )


class CompletionDeltas:
    """Deltas of texts. Choices are numbered prompt by prompt: prompt index x n + index of the completion."""

    chunk_kind = "text_completion"
    body_kind = "text_completion"

    def __init__(
        self,
        head: ResponseHead,
        usage: Usage,
        with_usage: bool,
        num_per_prompt: int,
        echoes: Sequence[str],
        tokens: TokenDetails | None = None,
    ) -> None:
        """`with_usage`: a stream ends with the token counts. `tokens`: what is said of tokens, if anything."""
        self.head = head
        self.usage = usage
        self._with_usage = with_usage
        self._tokens = tokens
        self._logprobs: dict[int, TextLogprobs] = {}
        self._num_per_prompt = num_per_prompt
        self._echoes = echoes
        """Per prompt, what its texts begin with."""
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._before_text: dict[int, bytes] = {}
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """The text, if any; with the reason when it ends."""
        if self._tokens is not None:
            return b"".join(self._detailed_events(self._tokens, prompt_index, completion, output))
        index = prompt_index * self._num_per_prompt + completion.index
        text = completion.text
        before = self._before_text.get(index)
        if before is None:
            before = self._before_text[index] = self._prefix + b'{"index":%d,"text":' % index
            text = self._echoes[prompt_index] + text
        if completion.finish_reason is not None:
            return self._event(_choice(index, text, completion))
        return before + _encode(text) + self._after_text if text else b""

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, piece by piece: the log-probabilities of many tokens as several events."""
        if self._tokens is None:
            yield self.events(prompt_index, completion, output)
        else:
            yield from self._detailed_events(self._tokens, prompt_index, completion, output)

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The text as a whole."""
        index = prompt_index * self._num_per_prompt + completion.index
        text = self._echoes[prompt_index] + completion.text
        if self._tokens is None:
            return _choice(index, text, completion)
        choice = _choice(index, text, completion) | token_ids(self._tokens, completion)
        if self._tokens.token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        choice["logprobs"] = TextLogprobs(self._tokens).whole(completion, output)
        if self._tokens.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output)
        return choice

    def end(self) -> bytes:
        """The token counts, where they are asked for, and [DONE]."""
        return self.head.end(self.chunk_kind, self.usage if self._with_usage else None)

    def failure(self, error: ApiError) -> bytes:
        """An event with the error, and [DONE]."""
        return broken_off(error)

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """All is in the choices."""
        return _encode({**self.head.fields(self.body_kind), "choices": choices, "usage": self.usage.to_json()})

    def _detailed_events(
        self, tokens: TokenDetails, prompt_index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[bytes]:
        """Events that say something of their tokens: the text of the prompt is in the first, the rest of the choice in
        the last."""
        index = prompt_index * self._num_per_prompt + completion.index
        logprobs = self._logprobs.get(index)
        head: dict[str, Any] = {}
        echo = ""
        if logprobs is None:
            logprobs = self._logprobs[index] = TextLogprobs(tokens)
            echo = self._echoes[prompt_index]
            if tokens.token_ids:
                head = {"prompt_token_ids": output.prompt_token_ids}
        last: dict[str, Any] | None = None
        for part in logprobs.parts(completion, output):
            if last is not None:
                yield self._event(_choice(index, echo) | head | {"logprobs": last})
                head = {}
                echo = ""
            last = part
        choice = _choice(index, echo + completion.text, completion) | token_ids(tokens, completion)
        yield self._event(choice | head | {"logprobs": last})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._prefix + _encode(choice) + self._suffix


def _choice(index: int, text: str, completion: CompletionOutput | None = None) -> dict[str, Any]:
    """`completion`: to say whether it has ended; None: the choice goes on."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None if completion is None else completion.finish_reason,
        "stop_reason": None if completion is None else completion.stop_reason,
    }
