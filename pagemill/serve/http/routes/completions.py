"""POST /v1/completions: prompts in, their continuations out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import COMPLETIONS
from pagemill.serve.http.responses import ResponseHead, now
from pagemill.serve.http.state import services

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/v1/completions", response_model=None)
async def create_completion(request: Request) -> Response:
    """Continue texts. Every prompt is checked before any runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    form, prepared, echoes = await here.intake.prepare(COMPLETIONS, request)
    head = ResponseHead(f"cmpl-{request.scope['request_id']}", here.model.name, now())
    deltas = CompletionDeltas(head, form.with_usage, form.num_per_prompt, echoes)
    return await answer(request, form, Generation(here.engine, prepared, deltas, form.with_usage))


class CompletionDeltas:
    """Deltas of texts. Choices are numbered prompt by prompt: prompt index x n + index of the completion."""

    chunk_kind = "text_completion"
    body_kind = "text_completion"

    def __init__(self, head: ResponseHead, with_usage: bool, num_per_prompt: int, echoes: Sequence[str]) -> None:
        self.head = head
        self._num_per_prompt = num_per_prompt
        self._echoes = echoes
        """Per prompt, what its texts begin with."""
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._before_text: dict[int, bytes] = {}
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The text, if any; with the reason when it ends."""
        index, text = prompt_index * self._num_per_prompt + completion.index, completion.text
        before = self._before_text.get(index)
        if before is None:
            before = self._before_text[index] = self._prefix + b'{"index":%d,"text":' % index
            text = self._echoes[prompt_index] + text
        if completion.finish_reason is not None:
            return self._prefix + _encode(self._whole(index, text, completion)) + self._suffix
        return before + _encode(text) + self._after_text if text else b""

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The text as a whole."""
        index = prompt_index * self._num_per_prompt + completion.index
        return self._whole(index, self._echoes[prompt_index] + completion.text, completion)

    def _whole(self, index: int, text: str, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
