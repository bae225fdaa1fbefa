"""Heads of requests: nothing of them is without a limit (CVE-2025-48956, giant headers)."""

import psutil
import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, flood, get, statuses

BLOCK = 2**16
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
FLOODS = {
    "headers": (GET, b"a: b\r\n" * (BLOCK // 6), 431),
    "the value of a header": (GET + b"x: ", b"a" * BLOCK, 431),
    "the name of a header": (GET, b"a" * BLOCK, 431),
    "the URL": (b"GET /", b"a" * BLOCK, 414),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * (BLOCK // 6), 431),
    "the value of a trailer": (CHUNKED + b"0\r\nx: ", b"a" * BLOCK, 431),
    "an extension of a chunk": (CHUNKED + b"5;", b"a" * BLOCK, 431),
    "blank lines": (b"", b"\r\n" * (BLOCK // 2), 431),
    "the method": (b"", b"A" * BLOCK, 400),
    "trailers of a request that was refused": (
        CHUNKED.replace(b"completions", b"nothing") + b"0\r\n",
        b"a: b\r\n" * 9999,
        404,
    ),
}


@pytest.mark.parametrize(("begin", "chunk", "status"), FLOODS.values(), ids=FLOODS.keys())
@pytest.mark.parametrize("api_key", [None, "k"])
def test_what_never_ends_is_cut_off(begin, chunk, status, api_key):
    process = psutil.Process()
    with running_server(FakeCore(), api_key=api_key and (api_key,)) as url:
        before = process.memory_info().rss
        num_sent, answer = flood(url, begin, chunk)
        assert num_sent < 16 * 2**20, "it was read on"
        assert process.memory_info().rss - before < 20 * 2**20
        # Where the route answers first, that is what the client gets; one that sends on and on may get nothing.
        assert set(statuses(answer)) <= {status, 401, 431}, answer[:200]
        assert statuses(answer_to(url, get("/health", "1.1", "connection: close"))) == [200]


def test_limits_are_settings():
    with running_server(FakeCore(), h11_max_header_count=4, h11_max_incomplete_event_size=2048) as url:
        lines = [f"x-{number}: y" for number in range(3)]
        assert statuses(answer_to(url, get("/health", "1.1", "connection: close", *lines[:2]))) == [200]
        assert statuses(answer_to(url, get("/health", "1.1", "connection: close", *lines))) == [431]
        assert statuses(answer_to(url, get("/health", "1.1", "connection: close", "x: " + "y" * 1000))) == [200]
        # Larger than the limit and than what the parser gets at once; the client is told, though it is not done.
        assert statuses(answer_to(url, get("/health", "1.1", "connection: close", "x: " + "y" * 100_000))) == [431]
        assert statuses(answer_to(url, get("/" + "y" * 100_000))) == [414]


def test_an_error_of_the_protocol_is_an_error_object():
    with running_server(FakeCore()) as url:
        answer = answer_to(url, b"nonsense\r\n\r\n")
        assert statuses(answer) == [400]
        assert b'{"error":{"message":"this is not an HTTP request","type":"invalid_request_error"' in answer
        assert b"connection: close" in answer


def test_an_error_of_the_protocol_has_the_form_of_the_routes_api():
    with running_server(FakeCore()) as url:
        assert b'{"error":"the headers are too large or too many"}' in answer_to(
            url, get("/api/tags", "1.1", "x: " + "y" * 100_000)
        )
        assert b'{"type":"error","error":' in answer_to(url, get("/v1/messages", "1.1", "a b"))


def test_trailers_are_no_headers():
    """They come when the application has the headers, or just before: what they say counts for nothing."""
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\nauthorization: Bearer k\r\n\r\n"
    )
    with running_server(FakeCore(), api_key=("k",)) as url:
        assert statuses(answer_to(url, request)) == [401]


def test_requests_that_want_another_protocol_are_answered_in_this_one():
    """And what follows them is read: some clients offer HTTP/2 with every request."""
    upgrade = get("/health", "1.1", "connection: upgrade", "upgrade: h2c")
    with running_server(FakeCore()) as url:
        assert statuses(answer_to(url, upgrade + get("/version", "1.1", "connection: close"))) == [200, 200]


def test_malformed_requests_do_not_fill_the_log(caplog):
    with running_server(FakeCore()) as url:
        for _ in range(50):
            answer_to(url, b"nonsense\r\n\r\n")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(warnings) <= 2


@pytest.mark.parametrize(("head", "status"), [
    (b"GET /ping HTTP/1.1\r\n", 400), (b"GET /ping HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
    (b"GET /ping HTTP/1.0\r\nhost: x\r\nHost: y\r\n", 400), (b"GET /ping HTTP/1.0\r\n", 200),
    (b"GET /ping HTTP/1.1\r\nhost:\r\n", 200), (b"GET /ping HTTP/1.1\r\nHOST: x\r\n", 200),
])  # fmt: skip
def test_which_host_is_meant_is_never_a_guess(head, status):
    with running_server(FakeCore()) as url:
        assert statuses(answer_to(url, head + b"connection: close\r\n\r\n")) == [status]
