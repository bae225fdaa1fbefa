"""`answer_lines`: each line of a batch file becomes a request of the HTTP application, and its answer a line again.

Knows OpenAI's format of batch files; knows nothing about what the application does with a request.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NamedTuple

import httpx

from pagemill.utils.request_ids import random_uuid

MAX_LINE_BYTES = 64 << 20
PREFIX = "/v1/"
"""Of the paths that a line may ask for."""


class BadLine(ValueError):
    """A line that is no request; its message is for the output."""


class BatchLine(NamedTuple):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]


class Answer(NamedTuple):
    """What became of one line."""

    line: str
    """JSON, without a newline."""
    ok: bool
    """Whether the application answered with success."""


async def answer_lines(client: httpx.AsyncClient, lines: Iterable[bytes], window: int) -> AsyncGenerator[Answer, None]:
    """An answer for every line that is not blank, in their order. At most `window` are under way; further lines are
    read when there is room. Closing it ends those under way."""
    seen: set[str] = set()
    running: deque[asyncio.Task[Answer]] = deque()
    try:
        for line in lines:
            if not line.strip():
                continue
            running.append(asyncio.create_task(_answer(client, line, seen)))
            if len(running) >= window:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(client: httpx.AsyncClient, line: bytes, seen: set[str]) -> Answer:
    given = _parsed(line)
    named = given.get("custom_id") if isinstance(given, dict) else None
    custom_id = named if isinstance(named, str) else None
    try:
        request = read_line(given)
        if request.custom_id in seen:
            raise BadLine(f"custom_id {request.custom_id!r} is that of an earlier line")
        seen.add(request.custom_id)
        response = await client.post(request.url, json=request.body)
    except BadLine as error:
        return _line(custom_id, None, {"code": "invalid_line", "message": str(error)})
    body = _parsed(response.content)
    reply = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": body if isinstance(body, (dict, list)) else response.text,
    }
    return _line(request.custom_id, reply, None)


def read_line(given: Any) -> BatchLine:
    """Raises BadLine, which says what is wrong and what is allowed."""
    if not isinstance(given, dict):
        raise BadLine("the line is not a JSON object")
    custom_id, method, url, body = (given.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"custom_id={custom_id!r} is not allowed: a text that names the line")
    if method not in (None, "POST"):
        raise BadLine(f"method={method!r} is not allowed: POST")
    if not isinstance(url, str) or not url.startswith(PREFIX) or "//" in url or ".." in url:
        raise BadLine(f"url={url!r} is not allowed: the path of an endpoint, such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise BadLine("body is not a JSON object, which is what the endpoint takes")
    if body.get("stream"):
        raise BadLine("body.stream=true is not allowed in a batch; leave it out")
    return BatchLine(custom_id, url, body)


def _parsed(text: bytes) -> Any:
    """None for what is no JSON, or is too long."""
    if len(text) > MAX_LINE_BYTES:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> Answer:
    entry = {"id": f"batch_req_{random_uuid()}", "custom_id": custom_id, "response": response, "error": error}
    return Answer(json.dumps(entry, ensure_ascii=False), response is not None and response["status_code"] < 400)
