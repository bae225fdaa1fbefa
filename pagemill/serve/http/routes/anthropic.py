"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for its clients."""

import functools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import ANTHROPIC, ApiError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.message_choice import MakeParser, MessageChoice
from pagemill.serve.http.preparer import COUNT_TOKENS, MESSAGES
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.schemas.answers import ClaudeEvent, ClaudeMessage, InputTokens
from pagemill.serve.http.schemas.anthropic import CountTokensBody, MessagesBody
from pagemill.serve.http.state import services
from pagemill.serve.parsers.interface import Delta

router = APIRouter()
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
"""Why an answer ended -> what clients are told. Whatever else ended it: its turn is over."""
REQUEST_ID = "request-id"
"""The header in which clients look for it."""
_encode = msgspec.json.encode


@router.post(
    "/v1/messages",
    response_model=None,
    openapi_extra=describes(ClaudeMessage, body=MessagesBody, event=ClaudeEvent),
)
async def create_message(request: Request) -> Response:
    """Continue a conversation. Everything is checked before anything runs.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    request_id = request.scope["request_id"]
    form, prepared, _ = await here.intake.prepare(MESSAGES, request)
    head = ResponseHead(f"msg_{request_id}", here.model.name, now())
    make_parser = functools.partial(here.parsers.make, form.message)
    deltas = MessageDeltas(head, Usage(prepared, here.engine.block_size), make_parser, request_id)
    generation = Generation(here.engine, prepared, deltas)
    return await answer(request, form, generation, headers={REQUEST_ID: request_id}, ping=_event("ping", {}))


@router.post(
    "/v1/messages/count_tokens",
    response_model=None,
    openapi_extra=describes(InputTokens, body=CountTokensBody),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, as it would be run.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    form, (tokens,) = await services(request).intake.tokens(COUNT_TOKENS, request)
    headers = form.headers() | {REQUEST_ID: request.scope["request_id"]}
    body = _encode({"input_tokens": tokens.count})
    return Response(body, headers=headers, media_type="application/json")


class MessageDeltas:
    """One message as blocks of thinking, text and calls of tools: as events, or as a body."""

    def __init__(
        self, head: ResponseHead, usage: Usage, make_parser: MakeParser, request_id: str | None = None
    ) -> None:
        self.head = head
        self.usage = usage
        self._request_id = request_id
        self._choice = MessageChoice(make_parser())
        self._begun = False
        self._num_blocks = 0
        self._open: tuple[str, int] | None = None
        """The kind of the block that events go on with, and for calls which one; None: there is none."""

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """The message's beginning, once; what is new, in blocks; why it ended."""
        events = b""
        if not self._begun:
            self._begun = True
            events = _event("message_start", {"message": self._message([], None)}) + _event("ping", {})
        for delta in self._choice.deltas(completion):
            events += self._delta_events(delta)
        if completion.finish_reason is not None:
            stop = _stop_of(self._choice, completion)
            events += self._close() + _event("message_delta", {"delta": stop, "usage": self._usage()})
        return events

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, in one piece."""
        yield self.events(prompt_index, completion, output)

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The blocks, and why there are no more."""
        content = _blocks(self._choice.deltas(completion))
        return {"index": completion.index, "content": content, "stop": _stop_of(self._choice, completion)}

    def end(self) -> bytes:
        """The event that says so."""
        return _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """An event with the error."""
        return b"event: error\ndata: " + error.body(ANTHROPIC, self._request_id) + b"\n\n"

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """The message."""
        return _encode(self._message(choices[0]["content"], choices[0]["stop"]))

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            **(stop or {"stop_reason": None, "stop_sequence": None}),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt that were found in the cache are counted apart from the others."""
        cached = self.usage.num_cached_tokens
        return {
            "input_tokens": self.usage.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.num_completion_tokens,
        }

    def _delta_events(self, delta: Delta) -> bytes:
        kind, part = _part_of(delta)
        number = delta.tool_call.number if delta.tool_call is not None else 0
        events = b""
        if self._open != (kind, number):
            events = self._close() + self._start(kind, delta)
            self._open = (kind, number)
        if not part:
            return events
        return events + _DELTA % (self._num_blocks - 1, *_DELTAS[kind], _encode(part))

    def _start(self, kind: str, delta: Delta) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", {"index": self._num_blocks - 1, "content_block": _empty(kind, delta)})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._num_blocks - 1})


_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_DELTAS = {
    "thinking": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
"""Kind of block -> the type of its deltas, and the field that holds them."""


def _part_of(delta: Delta) -> tuple[str, str]:
    """The kind of block that a delta belongs to, and its text."""
    if delta.tool_call is not None:
        return "tool_use", delta.tool_call.arguments
    return ("thinking", delta.reasoning) if delta.reasoning else ("text", delta.content)


def _empty(kind: str, delta: Delta) -> dict[str, Any]:
    """A block of which nothing is known but what it begins with."""
    if delta.tool_call is not None:
        name = delta.tool_call.name or ""
        return {"type": kind, "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _blocks(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """A whole message. Of a call that was cut short, the members that are complete."""
    blocks: list[dict[str, Any]] = []
    parts: list[str] = []
    last: tuple[str, int] | None = None
    for delta in deltas:
        kind, part = _part_of(delta)
        number = delta.tool_call.number if delta.tool_call is not None else 0
        if last != (kind, number):
            last = (kind, number)
            blocks.append(_empty(kind, delta))
            parts.append("")
        parts[-1] += part
    for block, text in zip(blocks, parts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        else:
            block[block["type"]] = text
    return blocks


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a call's JSON stands for, as far as it was written."""
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop_of(choice: MessageChoice, completion: CompletionOutput) -> dict[str, Any]:
    reason = choice.reason(completion) or ""
    if reason == "stop" and isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
