"""POST /v1/chat/completions: conversation in, assistant message out."""

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import CHAT
from pagemill.serve.http.responses import ResponseHead, now
from pagemill.serve.http.state import services
from pagemill.serve.parsers.interface import Delta, MessageParser, ToolCallDelta, merged

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
    deltas = ChatDeltas(head, form.with_usage, echo, functools.partial(here.parsers.make, form.message))
    return await answer(request, form, Generation(here.engine, prepared, deltas, form.with_usage))


class _Choice:
    """One message on its way."""

    __slots__ = ("before_content", "num_calls", "num_complete", "parser")

    def __init__(self, before_content: bytes, parser: MessageParser | None) -> None:
        self.before_content = before_content
        """The constant bytes of an event with content."""
        self.parser = parser
        """None: the whole text is content."""
        self.num_calls = 0
        self.num_complete = 0
        """Of the calls, those that can be made."""

    def deltas(self, parser: MessageParser, completion: CompletionOutput) -> list[Delta]:
        """What is new of the message."""
        deltas = parser.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            deltas = merged(deltas + parser.finish())
        for delta in deltas:
            if delta.tool_call is not None:
                self.num_calls += delta.tool_call.name is not None
                self.num_complete += delta.tool_call.complete
        return deltas

    def reason(self, completion: CompletionOutput) -> str | None:
        """Why the message ended. Calls are to be made where it ended by itself, after the last of them."""
        calls = completion.finish_reason == "stop" and self.num_calls and self.num_calls == self.num_complete
        return "tool_calls" if calls else completion.finish_reason


class ChatDeltas:
    """Assistant messages, as events or as choices of a body. The constant bytes of a choice's events are made once."""

    chunk_kind = "chat.completion.chunk"
    body_kind = "chat.completion"

    def __init__(
        self,
        head: ResponseHead,
        with_usage: bool,
        echo: str = "",
        make_parser: Callable[[], MessageParser | None] = lambda: None,
    ) -> None:
        """`echo`: what every message begins with. `make_parser` is asked for each message; None: all is content."""
        self.head = head
        self._echo = echo
        self._make_parser = make_parser
        self._prefix, self._suffix = head.around_choices(self.chunk_kind, with_usage)
        self._choices: dict[int, _Choice] = {}
        self._after_content = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def events(self, prompt_index: int, completion: CompletionOutput) -> bytes:
        """The role first, once per choice; then what is new of the message; then the reason of the end."""
        events = b""
        choice = self._choices.get(completion.index)
        if choice is None:
            events = self._event(completion.index, {"role": "assistant", "content": ""})
            before = self._prefix + b'{"index":%d,"delta":{"content":' % completion.index
            choice = self._choices[completion.index] = _Choice(before, self._make_parser())
            if self._echo:
                events += before + _encode(self._echo) + self._after_content
        if choice.parser is not None:
            events += self._parsed_events(choice, choice.parser, completion)
        elif completion.text:
            events += choice.before_content + _encode(completion.text) + self._after_content
        if completion.finish_reason is not None:
            events += self._event(completion.index, {}, choice.reason(completion), completion.stop_reason)
        return events

    def choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """The message as a whole."""
        choice = _Choice(b"", self._make_parser())
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + completion.text}
        if choice.parser is not None:
            message = _message(choice.deltas(choice.parser, completion), self._echo)
        return {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.reason(completion),
            "stop_reason": completion.stop_reason,
        }

    def _parsed_events(self, choice: _Choice, parser: MessageParser, completion: CompletionOutput) -> bytes:
        events = b""
        for delta in choice.deltas(parser, completion):
            if delta.content:
                events += choice.before_content + _encode(delta.content) + self._after_content
            elif delta.reasoning:
                events += self._event(completion.index, {"reasoning": delta.reasoning})
            elif delta.tool_call is not None and (delta.tool_call.name or delta.tool_call.arguments):
                events += self._event(completion.index, {"tool_calls": [_call_delta(delta.tool_call)]})
        return events

    def _event(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, stop_reason: int | str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._prefix + _encode(choice) + self._suffix


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """A part of a call as the API writes it; the first one has the id and the name."""
    if delta.name is None:
        return {"index": delta.number, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.number, "id": _new_call_id(), "type": "function", "function": function}


def _message(deltas: Sequence[Delta], echo: str) -> dict[str, Any]:
    """The deltas of a whole message as the API writes it."""
    content = echo + "".join([delta.content for delta in deltas])
    reasoning = "".join([delta.reasoning for delta in deltas])
    functions: dict[int, dict[str, str]] = {}
    for delta in deltas:
        if (call := delta.tool_call) is not None:
            function = functions.setdefault(call.number, {"name": call.name or "", "arguments": ""})
            function["arguments"] += call.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if not content and (reasoning or functions):
        message["content"] = None
    if reasoning:
        message["reasoning"] = reasoning
    if functions:
        message["tool_calls"] = [
            {"id": _new_call_id(), "type": "function", "function": function} for function in functions.values()
        ]
    return message


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
