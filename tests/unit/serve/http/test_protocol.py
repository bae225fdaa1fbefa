"""Events that are written straight to the connection, on a real server: the same bytes, in the same order."""

import json
import socket
import time
from typing import Any

import httpx
import pytest

from pagemill.serve.http.connection import EventSink
from pagemill.serve.http.protocol import MAX_JOINED_BYTES, DirectProtocol, _HeadWithBody, wire_of
from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore

PROMPT = "<0123456789>"
NUM_TOKENS = 240


def streamed(url: str, pause_s: float = 0.0) -> bytes:
    """The raw answer to a streamed completion, of which nothing is read at first."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    raw = b""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + body)
        time.sleep(pause_s)
        while part := sock.recv(2048):
            raw += part
    return raw


def body_of(raw: bytes) -> bytes:
    """Of a chunked answer."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if not length:
            return body
        body, rest = body + rest[:length], rest[length + 2 :]


def text_of(raw: bytes) -> str:
    *events, done, end = body_of(raw).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events)


@pytest.mark.slow
def test_events_are_written_directly_once_the_response_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[bytes] = []
    write = DirectProtocol.write_chunk

    def note(self: DirectProtocol, body: bytes) -> None:
        chunks.append(body)
        write(self, body)

    monkeypatch.setattr(DirectProtocol, "write_chunk", note)
    with running_server(FakeCore(step_s=0.001)) as url:
        raw = streamed(url)
    assert text_of(raw) == PROMPT * (NUM_TOKENS // len(PROMPT))
    assert len(chunks) > NUM_TOKENS // 2
    assert all(chunk.startswith(b"data: ") and chunk in raw for chunk in chunks)


@pytest.mark.slow
def test_a_slow_client_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    connect, has_room = DirectProtocol.connection_made, DirectProtocol.has_room

    def connect_narrowly(self: DirectProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=256)
        connect(self, transport)

    def note(self: DirectProtocol) -> bool:
        if not has_room(self):
            refused.append(True)
        return has_room(self)

    monkeypatch.setattr(DirectProtocol, "connection_made", connect_narrowly)
    monkeypatch.setattr(DirectProtocol, "has_room", note)
    with running_server(FakeCore(step_s=0.0005)) as url:
        raw = streamed(url, pause_s=0.5)
    assert refused
    assert text_of(raw) == PROMPT * (NUM_TOKENS // len(PROMPT))


def test_elsewhere_there_is_no_wire() -> None:
    assert wire_of({"type": "http"}) is None
    sink: EventSink[bytes] = EventSink(None)
    sink.begun = True
    sink.events_of = lambda output: output
    assert not sink.is_open()
    sink.push(b"")
    with pytest.raises(RuntimeError):
        sink.push(b"x")


class Writes:
    """A transport that remembers what was written, and when it was closed."""

    def __init__(self) -> None:
        self.seen: list[bytes | None] = []

    def write(self, data: bytes) -> None:
        self.seen.append(data)

    def close(self) -> None:
        self.seen.append(None)


@pytest.mark.parametrize(
    ("bodies", "written"),
    [
        ([b"body"], [b"headbody", None]),
        ([b"a", b"b"], [b"heada", b"b", None]),
        ([], [b"head", None]),
        ([b"", b"b"], [b"head", b"b", None]),
        ([bytes(MAX_JOINED_BYTES + 1)], [b"head", bytes(MAX_JOINED_BYTES + 1), None]),
    ],
)
def test_the_head_goes_out_with_the_beginning_of_the_body(bodies: list[bytes], written: list[bytes | None]) -> None:
    transport = Writes()
    response = _HeadWithBody(transport)  # type: ignore[arg-type]
    response.write(b"head")
    for body in bodies:
        response.write(body)
    response.flush()
    response.close()
    assert transport.seen == written


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_several_requests_of_one_connection_are_answered_with_and_without_a_body(method: str) -> None:
    with running_server(FakeCore()) as url, httpx.Client(base_url=url) as client:
        for _ in range(3):
            answer = client.request(method, "/v1/models")
            assert answer.status_code == 200
            assert bool(answer.content) is (method == "GET")
            assert int(answer.headers["content-length"]) > 20
