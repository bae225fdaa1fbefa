"""Time: whoever is slow to send or to read is not waited for without end."""

import time

import httpx
import pytest

from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.security.raw import connect, get, is_closed, post, read_all, statuses, wait_until_hung_up

pytestmark = pytest.mark.slow
SHORT = {
    "timeout_request_head": 1.0,
    "timeout_request_body": 1.0,
    "timeout_keep_alive": 0.5,
    "timeout_slow_reader": 1.0,
}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("begin", "status"), [
    (b"", None), (b"\r\n", None), (b"GET /hea", 408), (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", 408),
    (CHUNKED + b"5\r\nab", 408), (post({"prompt": "a"})[:-3], 408), (CHUNKED + b"0\r\nx: ", 408),
])  # fmt: skip
@pytest.mark.parametrize("drip", [b"", b"a"])
def test_what_is_begun_must_be_finished(begin, status, drip):
    """Also when a byte comes now and then."""
    with running_server(FakeCore(), **SHORT) as url, connect(url) as sock:
        sock.sendall(begin)
        begun = time.monotonic()
        sock.settimeout(0.3)
        answer = None
        while answer is None and time.monotonic() - begun < 120:
            try:
                answer = read_all(sock)
            except TimeoutError:
                if begin.strip() and drip:
                    sock.sendall(drip)
        assert answer is not None, "it is open still"
        assert (
            statuses(answer) in ([status], [400], []) if drip else statuses(answer) == [status] * (status is not None)
        )


def test_a_connection_without_a_request_is_closed():
    with running_server(FakeCore(), **SHORT) as url, connect(url) as sock:
        sock.sendall(get())
        assert statuses(read_all(sock)) == [200]


def test_a_request_may_take_longer_than_all_of_these():
    with running_server(FakeCore(step_s=0.03), **SHORT) as url, connect(url) as sock:
        sock.sendall(post({"prompt": "a", "max_tokens": 150}, "/v1/completions", "1.1", "connection: close"))
        answer = read_all(sock)
    assert statuses(answer) == [200]
    assert b'"completion_tokens":150' in answer


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_disconnected(stream):
    """A stream is ended by it; an answer that is complete is dropped."""
    core = FakeCore(step_s=0.0005)
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 32, "temperature": 1.0, "stream": stream}
    with running_server(core, **SHORT) as url, connect(url, rcvbuf=2048) as sock:
        sock.sendall(post(body, "/v1/chat/completions") + get("/") * 200)
        wait_until(lambda: core.num_running > 0)
        wait_until(lambda: core.num_running == 0, 60)
        wait_until_hung_up(sock)
        assert httpx.get(f"{url}/health").status_code == 200
        raw = read_all(sock)
        assert b"[DONE]" not in raw or not stream
        assert is_closed(sock)


def test_bodies_that_are_not_complete_are_bounded_together(monkeypatch):
    from pagemill.serve.http import middleware

    monkeypatch.setattr(middleware.BodyLimitMiddleware.__init__, "__defaults__", (2**20, 3 * 2**20))
    part = b"80000\r\n" + b"a" * 2**19 + b"\r\n"
    with running_server(FakeCore()) as url:
        slow = [connect(url) for _ in range(8)]
        for sock in slow:
            sock.sendall(CHUNKED + part)
        waiting = list(slow)

        def num_refused():
            waiting[:] = [sock for sock in waiting if not _is_refused(sock)]
            return len(slow) - len(waiting)

        wait_until(lambda: num_refused() >= 2)
        assert 2 <= num_refused() <= 3
        for sock in slow:
            sock.close()
        body = {"prompt": "a" * 100, "max_tokens": 1}
        wait_until(lambda: httpx.post(f"{url}/v1/completions", json=body).status_code == 200)


def _is_refused(sock):
    sock.settimeout(0.1)
    try:
        return statuses(sock.recv(1000)) == [503]
    except TimeoutError:
        return False


def test_a_blank_line_behind_a_body_ends_nothing():
    """Some clients send one, which belongs to no request; the answer takes as long as it takes."""
    with running_server(FakeCore(step_s=0.03), **SHORT) as url, connect(url) as sock:
        sock.sendall(post({"prompt": "a", "max_tokens": 150}))
        time.sleep(0.2)
        sock.sendall(b"\r\n")
        answer = read_all(sock)
    assert statuses(answer) == [200]
    assert b'"completion_tokens":150' in answer
