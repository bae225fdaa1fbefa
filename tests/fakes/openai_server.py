"""An OpenAI-like server with scripted answers and the playground, on a port of its own. Runs no model."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pagemill.serve.http.routes.playground import router

ANSWER = "The **ocean** is wide."


@dataclass
class Script:
    """What the server does; tests change it between requests."""

    pieces: list[str] = field(default_factory=lambda: ["The ", "**ocean** ", "is ", "wide."])
    deltas: list[dict[str, Any]] | None = None
    """Of a chat, in place of the pieces: whole deltas."""
    accepted: list[int] | None = None
    """Tokens of each piece that were drafts; every piece is a step that verified two. None: nothing is said of any."""
    delay_s: float = 0.01
    """Before each piece."""
    error: tuple[int, str] | None = None
    """Status and message of every answer but /v1/models."""
    break_after: int | None = None
    """Pieces after which the stream fails with an error event."""
    api_key: str | None = None


class FakeOpenAIServer:
    """`with FakeOpenAIServer() as server:` serves at `server.url`; requests and aborts are noted."""

    def __init__(self) -> None:
        self.script = Script()
        self.bodies: list[dict[str, Any]] = []
        self.num_aborted = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(), log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        self._socket.close()

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(router)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            return self._locked(request) or JSONResponse({"object": "list", "data": [{"id": "fake-135m"}]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._answer(request, lambda text: {"delta": {"content": text}}, self.script.deltas)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(request, lambda text: {"text": text})

        return app

    def _locked(self, request: Request) -> Response | None:
        if self.script.api_key and request.headers.get("authorization") != f"Bearer {self.script.api_key}":
            return JSONResponse({"error": {"message": "wrong key", "code": 401}}, 401)
        return None

    async def _answer(self, request: Request, choice: Any, deltas: list[dict[str, Any]] | None = None) -> Response:
        self.bodies.append(await request.json())
        if locked := self._locked(request):
            return locked
        if self.script.error:
            status, message = self.script.error
            return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)
        pieces = [choice(text) for text in self.script.pieces]
        if deltas is not None:
            pieces = [{"delta": delta} for delta in deltas]
        return StreamingResponse(self._events(pieces, choice("")), media_type="text/event-stream")

    def _usage(self, num_pieces: int, num_all: int) -> dict[str, Any] | None:
        """After so many pieces; None where it is not told before the end."""
        accepted = self.script.accepted
        if accepted is None and num_pieces < num_all:
            return None
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": num_pieces, "total_tokens": 7 + num_pieces}
        if accepted is None:
            return usage
        found = sum(accepted[:num_pieces])
        details = {"accepted_prediction_tokens": found, "rejected_prediction_tokens": 2 * num_pieces - found}
        return usage | {"completion_tokens": num_pieces + found, "completion_tokens_details": details}

    async def _events(self, pieces: list[dict[str, Any]], last: dict[str, Any]) -> AsyncIterator[str]:
        script = self.script
        try:
            for number, piece in enumerate(pieces):
                if number == script.break_after:
                    yield event({"error": {"message": "the engine died"}})
                    return
                await asyncio.sleep(script.delay_s)
                counts = self._usage(number + 1, len(pieces))
                yield event({"choices": [{"index": 0, **piece, "finish_reason": None}], "usage": counts})
            yield event({"choices": [{"index": 0, **last, "finish_reason": "stop"}]})
            yield event({"choices": [], "usage": self._usage(len(pieces), len(pieces))})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
