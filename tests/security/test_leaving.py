"""Clients of all manners: those that close half of the connection get their answer, those that close it do not."""

import socket

import httpx
import pytest

from pagemill.serve.http import middleware
from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, connect, get, post, read_all, statuses

SHORT = {"prompt": "hi", "max_tokens": 20}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step_s", [0.001, 0.03])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_client_that_closes_its_sending_half_gets_its_answers(stream, step_s, num_requests):
    core = FakeCore(step_s=step_s)
    with running_server(core) as url, connect(url) as sock:
        sock.sendall(post(SHORT | {"stream": stream}) * num_requests)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert statuses(answer) == [200] * num_requests
    assert answer.count(b"[DONE]" if stream else b'"completion_tokens":20') == num_requests
    assert not core.aborted


def test_half_a_request_of_such_a_client_is_none():
    core = FakeCore()
    with running_server(core) as url, connect(url) as sock:
        sock.sendall(post(SHORT)[:-5])
        sock.shutdown(socket.SHUT_WR)
        assert statuses(read_all(sock)) == []
    assert core.num_steps == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_leaves_is_aborted_soon(stream, version):
    core = FakeCore(step_s=0.02)
    with running_server(core) as url:
        sock = connect(url)
        sock.sendall(post({"prompt": "hi", "max_tokens": 200, "stream": stream}, "/v1/completions", version))
        wait_until(lambda: core.num_running == 1)
        sock.close()
        wait_until(lambda: core.num_running == 0, 60)
        assert len(core.aborted) == 1


def test_a_client_that_leaves_while_it_waits_in_the_queue_is_aborted():
    core = FakeCore(step_s=0.05)
    with running_server(core, scheduler={"max_num_seqs": 1}) as url, connect(url) as first:
        first.sendall(post({"prompt": "hi", "max_tokens": 150}))
        wait_until(lambda: core.num_running == 1)
        second = connect(url)
        second.sendall(post({"prompt": "ho", "max_tokens": 150, "stream": True}))
        wait_until(lambda: len(core.seen) == 2)
        second.close()
        wait_until(lambda: len(core.aborted) == 1, 60)


@pytest.mark.slow
def test_many_that_leave_at_every_stage_leave_nothing(monkeypatch):
    """In the head, in the body, before the first token, in a stream: the room for bodies and the engine are free."""
    part = b"80000\r\n" + b"a" * 2**19 + b"\r\n"
    monkeypatch.setattr(middleware.BodyLimitMiddleware.__init__, "__defaults__", (2**20, 4 * 2**20))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    long = {"prompt": "hi", "max_tokens": 200, "stream": True}
    core = FakeCore(step_s=0.02)
    with running_server(core) as url:
        for _ in range(3):
            socks = [connect(url) for _ in range(24)]
            for number, sock in enumerate(socks):
                sock.sendall([post(long)[:20], head + part, post(long), post(long | {"stream": False})][number % 4])
            wait_until(lambda: core.num_running > 0)
            for sock in socks[2::8]:
                sock.settimeout(60)
                assert sock.recv(1), "it streams"
            for sock in socks:
                sock.close()
            wait_until(lambda: core.num_running == 0, 60)
        wait_until(lambda: httpx.post(f"{url}/v1/completions", json=SHORT | {"prompt": "a" * 100}).status_code == 200)
    assert not core.has_work()


def test_http_1_0_gets_no_chunks():
    body = SHORT | {"stream": True}
    with running_server(FakeCore(step_s=0.001)) as url:
        old = answer_to(url, post(body, "/v1/completions", "1.0"))
        whole = answer_to(url, post(SHORT, "/v1/completions", "1.0", "connection: keep-alive"))
    head, _, events = old.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n")[:-1])
    assert statuses(whole) == [200]


def test_head_says_what_get_would():
    with running_server(FakeCore()) as url:
        for path in ("/health", "/version", "/v1/models", "/", "/metrics"):
            got = answer_to(url, get(path, "1.0")).partition(b"\r\n\r\n")
            asked = answer_to(url, get(path, "1.0").replace(b"GET", b"HEAD")).partition(b"\r\n\r\n")
            assert statuses(asked[0]) == [200]
            assert asked[2] == b""
            names = {line.partition(b":")[0] for line in got[0].split(b"\r\n")[1:]}
            assert {line.partition(b":")[0] for line in asked[0].split(b"\r\n")[1:]} == names


@pytest.mark.parametrize("path", ["/health/", "/v1/models/?a=b", "/v1/completions/"])
def test_redirects_stay_on_this_server(path):
    """Whatever the client calls it, in whichever form."""
    with running_server(FakeCore(), allowed_hosts="*") as url:
        for target in (path, f"http://evil.example{path}"):
            request = f"GET {target} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".encode()
            answer = answer_to(url, request)
            assert b"evil" not in answer
            assert statuses(answer)[0] in (307, 404, 405)
        assert b"location: /health\r\n" in answer_to(url, get("/health/", "1.0"))
        assert statuses(answer_to(url, get("//evil.example/%2f..", "1.0"))) == [404]
