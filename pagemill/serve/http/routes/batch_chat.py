"""POST /v1/chat/completions/batch: conversations in, an assistant message for each out."""

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.described import describes
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import BATCH_CHAT
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.routes.chat import ChatDeltas
from pagemill.serve.http.schemas.answers import ChatCompletion
from pagemill.serve.http.schemas.batch_chat import BatchChatBody
from pagemill.serve.http.state import services

router = APIRouter()


@router.post(
    "/v1/chat/completions/batch",
    response_model=None,
    openapi_extra=describes(ChatCompletion, body=BatchChatBody),
)
async def create_chat_completions(request: Request) -> Response:
    """Continue several conversations. All of them are checked before any runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    forms, body = await here.intake.prepare_several(BATCH_CHAT, request)
    head = ResponseHead(f"chatcmpl-{request.scope['request_id']}", here.model.name, now())
    usage = Usage(body.requests, here.engine.block_size)
    chats = [
        ChatDeltas(head, usage, False, echo, functools.partial(here.parsers.make, form.message), form.tokens)
        for form, echo in zip(forms, body.echoes, strict=True)
    ]
    return await answer(request, forms[0], Generation(here.engine, body.requests, BatchDeltas(head, usage, chats)))


class BatchDeltas(ChatDeltas):
    """A message for each conversation, as the choices of one body."""

    def __init__(self, head: ResponseHead, usage: Usage, chats: Sequence[ChatDeltas]) -> None:
        """`chats`: how each message is made."""
        super().__init__(head, usage)
        self._chats = chats

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The message of one conversation, and what is said of its prompt."""
        chat = self._chats[prompt_index]
        return chat.choice(prompt_index, completion, output) | {"index": prompt_index} | chat.extras
