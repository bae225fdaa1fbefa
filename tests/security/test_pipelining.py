"""Several requests on one connection: bounded, answered in order, and no place to hide that the client left."""

import contextlib
import threading
import time

import httpx
import psutil
import pytest

from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, connect, get, is_closed, post, read_all, read_quietly, reset, statuses

LONG = {"prompt": "hi", "max_tokens": 200}
CLOSE = ("1.1", "connection: close")


def test_all_are_answered_in_order():
    requests = [get("/health"), get("/nothing"), post({"prompt": "a", "max_tokens": 1}), get("/version")] * 100
    with running_server(FakeCore()) as url:
        answer = answer_to(url, b"".join(requests) + get("/health", *CLOSE))
    assert statuses(answer) == [200, 404, 200, 200] * 100 + [200]


@pytest.mark.parametrize("reads", [True, False])
def test_however_many_come_they_take_no_memory(reads):
    process = psutil.Process()
    with running_server(FakeCore()) as url, connect(url) as sock:
        assert httpx.get(f"{url}/health").status_code == 200
        before = process.memory_info().rss
        if reads:
            threading.Thread(target=read_quietly, args=(sock,), daemon=True).start()
        sock.settimeout(1)
        chunk, end = get("/health") * 1000, time.monotonic() + 4
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                sock.sendall(chunk)
        assert process.memory_info().rss - before < 40 * 2**20
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("leave", [lambda sock: sock.close(), reset], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", ["nothing", "one", "itself", "many", "a part"])
def test_who_leaves_is_aborted(leave, stream, behind):
    core = FakeCore(step_s=0.02)
    request = post(LONG | {"stream": stream})
    more = {"nothing": b"", "one": get(), "itself": request, "many": get() * 50_000, "a part": get()[:10]}[behind]
    with running_server(core) as url:
        sock = connect(url)
        sock.sendall(request)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: core.num_running == 1)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while more:
                more = more[sock.send(more) :]
        time.sleep(0.1)
        leave(sock)
        wait_until(lambda: len(core.aborted) == 1 and core.num_running == 0, 60)
        assert core.num_steps < 190
        time.sleep(0.2)
        assert core.num_running == 0, "a request behind it was begun"


def test_a_large_body_does_not_hide_it_either():
    """Reading pauses while the application has not taken the body; nobody is sent an interim response for that."""
    core = FakeCore(step_s=0.02)
    body = LONG | {"user": "x" * 3_000_000}
    with running_server(core) as url:
        answer = answer_to(url, post(body | {"max_tokens": 100}, "/v1/completions", *CLOSE))
        assert answer.startswith(b"HTTP/1.1 200")
        sock = connect(url)
        sock.sendall(post(body))
        wait_until(lambda: core.num_running == 1)
        sock.close()
        wait_until(lambda: core.num_running == 0, 60)
        assert len(core.aborted) == 1


def test_rubbish_behind_a_request_spoils_no_answer():
    core = FakeCore(step_s=0.001)
    with running_server(core) as url:
        alone = answer_to(url, post(LONG | {"stream": True}, "/v1/completions", *CLOSE))
        answer = answer_to(url, post(LONG | {"stream": True}) + b"rubbish\r\n\r\n")
    assert statuses(answer) == [200]
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.count(b"data: ") == alone.count(b"data: ")


def test_half_a_request_behind_another_is_timed_out_behind_it():
    core = FakeCore(step_s=0.01)
    with running_server(core, timeout_request_head=1.0) as url, connect(url) as sock:
        sock.sendall(post(LONG) + get()[:10])
        answer = read_all(sock)
    assert statuses(answer) == [200]


def test_a_request_behind_a_refused_body_is_answered():
    """The body of the first is not read by anybody, and not taken for a request."""
    first = post({"prompt": "x" * 300_000}, "/no/such/route")
    with running_server(FakeCore()) as url:
        assert statuses(answer_to(url, first + get("/health", *CLOSE))) == [404, 200]
        with connect(url) as sock:
            sock.sendall(first[:1000])
            assert sock.recv(1000).startswith(b"HTTP/1.1 404")
            assert not is_closed(sock)
