import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from pagemill.cli.errors import ServerError
from pagemill.cli.session import Delta, Usage
from pagemill.cli.session_http import HttpSession, parse_chunk

URL = "http://test.invalid"


def session(answer: Callable[[httpx.Request], httpx.Response], **options: str) -> HttpSession:
    return HttpSession(URL, transport=httpx.MockTransport(answer), **options)


def streaming(*chunks: bytes) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(200, stream=Pieces(chunks))


class Pieces(httpx.SyncByteStream):
    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self.chunks = chunks
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks

    def close(self) -> None:
        self.closed = True


def event(data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


STREAM = (
    event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    + event({"choices": [{"delta": {"content": "Grüße"}}]})
    + b": keep-alive\n\n"
    + event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    + event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}})
    + b"data: [DONE]\n\n"
)
DELTAS = [Delta(), Delta("Grüße"), Delta("", "stop"), Delta(usage=Usage(7, 2))]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_stream_may_be_cut_anywhere(size: int):
    chunks = tuple(STREAM[start : start + size] for start in range(0, len(STREAM), size))
    assert list(session(streaming(*chunks)).stream_chat([{"role": "user", "content": "x"}], {})) == DELTAS


def test_what_is_sent():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers.get("authorization"), json.loads(request.content)))
        return httpx.Response(200, content=STREAM)

    messages = [{"role": "user", "content": "x"}]
    list(session(answer).stream_chat(messages, {"top_p": 0.5}))
    list(session(answer, model="m", api_key="k").stream_completion("x", {}))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert seen[0] == ("/v1/chat/completions", None, {"messages": messages, "top_p": 0.5, **stream})
    assert seen[1] == ("/v1/completions", "Bearer k", {"prompt": "x", "model": "m", **stream})


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "top_k=-3"}}), "the server answered 400: top_k=-3"),
        (httpx.Response(404, json={"detail": "Not Found"}), "the server answered 404: {'detail': 'Not Found'}"),
        (httpx.Response(502, text="<html>proxy"), "the server answered 502: <html>proxy"),
        (httpx.Response(401, json={}), "the server wants a key: give --api-key"),
        (httpx.Response(200, content=event({"error": {"message": "engine died"}})), "the server failed: engine died"),
        (httpx.Response(200, content=event({"choices": []})), "the server broke off its answer"),
        (httpx.Response(200, content=b"data: {oops\n\n"), "the server sent something that is not a chunk: {oops"),
        (httpx.Response(200, content=b"data: 3\n\n"), "the server sent something that is not a chunk: 3"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(response: httpx.Response, message: str):
    with pytest.raises(ServerError, match=r"^the server") as caught:
        list(session(lambda request: response).stream_completion("x", {}))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_connection_that_breaks():
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    with pytest.raises(ServerError, match=r"the connection to http://test\.invalid broke: reset by peer"):
        list(session(answer).stream_completion("x", {}))


def test_closing_the_answer_closes_the_connection():
    body = Pieces((event({"choices": [{"text": "a"}]}), event({"choices": [{"text": "b"}]})))
    deltas = session(lambda request: httpx.Response(200, stream=body)).stream_completion("x", {})
    assert next(deltas) == Delta("a")
    assert not body.closed
    deltas.close()
    assert body.closed


def test_cached_tokens_are_read():
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert parse_chunk(json.dumps({"choices": [], "usage": usage})).usage == Usage(7, 2, 4)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_end_in_v1(url: str):
    assert HttpSession(url).url == "http://h:1"
