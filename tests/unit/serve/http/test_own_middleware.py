"""The operator's middleware: a class, a function, and what is neither."""

from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import ConfigError
from pagemill.serve.http.middleware import MAX_BODY_BYTES
from pagemill.serve.http.own_middleware import own_middleware
from tests.unit.serve.http.conftest import Connect

HERE = __name__
SEEN: list[str] = []


class Naming:
    """Adds a header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-naming", b"yes")]
            await send(message)

        await self.app(scope, receive, named)


async def teapot(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuses what says so; reads the body of the others first."""
    SEEN.append(request.url.path)
    if "x-tea" in request.headers:
        return PlainTextResponse("short and stout", 418)
    if request.headers.get("x-fails"):
        raise ValueError("of the operator")
    await request.body()
    return await call_next(request)


async def test_both_kinds(connect: Connect) -> None:
    client = await connect(middleware=(f"{HERE}.Naming", f"{HERE}.teapot"))
    body = {"prompt": "hi", "max_tokens": 3}
    answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers["x-naming"]) == (200, "yes")
    stream = await client.post("/v1/completions", json=body | {"stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")
    refused = await client.get("/v1/models", headers={"x-tea": "1"})
    assert (refused.status_code, refused.text, refused.headers["x-naming"]) == (418, "short and stout", "yes")
    assert len(refused.headers["x-request-id"]) == 32


async def test_it_sees_what_was_let_in(connect: Connect) -> None:
    """Behind the key, and with a limit of bodies; what it raises is an error of this server's form."""
    client = await connect(middleware=(f"{HERE}.teapot",), api_key="k")
    SEEN.clear()
    assert (await client.get("/v1/models")).status_code == 401
    assert not SEEN
    key = {"authorization": "Bearer k"}
    large = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    answer = await client.post("/v1/completions", content=large, headers=key | {"content-type": "application/json"})
    assert answer.status_code == 413
    failed = await client.get("/v1/models", headers=key | {"x-fails": "1"})
    assert (failed.status_code, "of the operator" in failed.text) == (500, False)


@pytest.mark.parametrize("path", ["Naming", "no_such_module.Naming", f"{HERE}.nothing", f"{HERE}.HERE", "a b.c", ""])
def test_what_is_neither_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="middleware="):
        own_middleware((path,))
