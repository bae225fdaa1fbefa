"""POST /v1/chat/completions: conversation in, assistant message out."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import CHAT
from pagemill.serve.http.responses import ResponseHead, now
from pagemill.serve.http.state import services

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation. Everything is checked before anything runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    form, prepared, (echo,) = await here.intake.prepare(CHAT, request)
    head = ResponseHead(f"chatcmpl-{request.scope['request_id']}", here.model.name, now())
    deltas = ChatDeltas(head, form.with_usage, echo)
    return await answer(request, form, Generation(here.engine, prepared, deltas, form.with_usage))


class ChatDeltas:
    """Deltas of assistant messages. The constant bytes of a choice's events are made once."""

    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"

    def __init__(self, head: ResponseHead, with_usage: bool, echo: str = "") -> None:
        """`echo`: what every message begins with."""
        self.head = head
        self._echo = echo
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._before_content: dict[int, bytes] = {}
        self._after_content = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The role first, once per choice; then text; then the reason of the end."""
        events = b""
        before = self._before_content.get(completion.index)
        if before is None:
            events = self._event(completion.index, {"role": "assistant", "content": ""})
            before = self._before_content[completion.index] = (
                self._prefix + b'{"index":%d,"delta":{"content":' % completion.index
            )
            if self._echo:
                events += before + _encode(self._echo) + self._after_content
        if completion.text:
            events += before + _encode(completion.text) + self._after_content
        if completion.finish_reason is not None:
            events += self._event(completion.index, {}, completion)
        return events

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The message as a whole."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": self._echo + completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _event(self, index: int, delta: dict[str, str], finished: CompletionOutput | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if finished is not None:
            choice |= {"finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason}
        return self._prefix + _encode(choice) + self._suffix
