"""Requests that ask for another protocol, as some clients' first one does: answered over HTTP/1.1, body and all."""

import time

import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.security.raw import connect, get, post, read_all, statuses

UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
LENGTH = post({"prompt": "a", "user": "x" * 9000}, "/v1/completions", "1.1", *UPGRADE)
EMPTY = b"\r\n".join([
    b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", b"content-length: 0",
    *(header.encode() for header in UPGRADE), b"", b"",
])  # fmt: skip


def _chunked(request):
    head, _, body = request.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    parts = [body[start : start + 1000] for start in range(0, len(body), 1000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", chunks]) + b"0\r\nx: y\r\n\r\n"


@pytest.mark.parametrize("size", [10**6, pytest.param(700, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("request_", "status"), [
    (LENGTH, 200), (_chunked(LENGTH), 200), (EMPTY, 400), (get("/version", "1.1", *UPGRADE), 200),
])  # fmt: skip
def test_the_body_is_read_and_so_is_what_follows(request_, status, size):
    content = request_ + get("/nothing") + request_ + get("/version", "1.1", "connection: close")
    with running_server(FakeCore(say("yes", EOS))) as url, connect(url) as sock:
        for start in range(0, len(content), size):
            sock.sendall(content[start : start + size])
            if size < len(content):
                time.sleep(0.01)
        answer = read_all(sock)
    assert statuses(answer) == [status, 404, status, 200]
    assert answer.count(b'"text":"yes"') == (2 if "POST" in str(request_) and status == 200 else 0)


def test_a_body_that_is_too_large_is_refused():
    head = LENGTH.partition(b"\r\n\r\n")[0].replace(b"content-length: ", b"content-length: 99999")
    with running_server(FakeCore()) as url, connect(url) as sock:
        sock.sendall(head + b"\r\n\r\n" + b" " * 10_000)
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
