"""Numbers of connections: there are never more than there are descriptors, and somebody new gets in."""

import asyncio
import errno
import re
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.serve.http import limits
from pagemill.serve.http.limits import MAX_CONNECTIONS, SPARE_DESCRIPTORS, limits_of
from pagemill.serve.http.server import HttpServer, bind
from tests.fakes.engine import running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.faults.lab import Server, wait_for
from tests.security.raw import answer_to, connect, get, is_closed, post, statuses

CLOSE = ("1.1", "connection: close")


def test_idle_connections_give_way():
    core = FakeCore(step_s=0.1)
    with running_server(core, limit_concurrency=10) as url:
        busy = connect(url)
        busy.sendall(post({"prompt": "hi", "max_tokens": 60}, "/v1/completions", *CLOSE))
        wait_until(lambda: core.num_running == 1)
        others = [connect(url) for _ in range(30)]
        for sock in others[::2]:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        assert statuses(answer_to(url, get("/health", *CLOSE))) == [200]
        wait_until(lambda: sum(is_closed(sock) for sock in others) >= 20)
        assert not is_closed(busy)
        core.step_s = 0.0
        busy.setblocking(True)
        assert statuses(busy.recv(65536)) == [200], "a request at work gives way to nobody"
        for sock in (busy, *others):
            sock.close()


def test_at_the_limit_new_ones_are_told_to_come_again():
    core = FakeCore(step_s=0.1)
    with running_server(core, limit_concurrency=8) as url:
        busy = [connect(url) for _ in range(8)]
        for sock in busy:
            sock.sendall(post({"prompt": "hi", "max_tokens": 40, "stream": True}))
        wait_until(lambda: core.num_running == 8)
        answer = answer_to(url, get("/health"))
        assert statuses(answer) == [503]
        assert b"Retry-After: 1" in answer
        assert b'"code":"too_many_connections"' in answer
        assert statuses(answer_to(url, post({"prompt": "x" * 100_000}))) == [503], "the client got to read it"
        for sock in busy:
            sock.close()
        wait_until(lambda: core.num_running == 0)
        assert httpx.get(f"{url}/health").status_code == 200


async def test_what_cannot_be_accepted_is_said_once(caplog):
    """asyncio tells of each; and an idle connection gives way."""

    class Idle:
        gone = False

        def give_way(self):
            self.gone = True

    server = HttpServer(None, bind("127.0.0.1", 0))
    idle = [Idle() for _ in range(3)]
    for connection in idle:
        server._connections.add(connection)
    error = OSError(errno.EMFILE, "Too many open files")
    for _ in range(2):
        context = {"message": "socket.accept() out of system resource", "exception": error}
        server._on_loop_error(asyncio.get_running_loop(), context)
    server.sock.close()
    assert [connection.gone for connection in idle] == [True, True, False]
    assert len(caplog.records) == 1
    server._on_loop_error(asyncio.get_running_loop(), {"message": "something else"})
    assert "something else" in caplog.text


def test_limits_follow_from_descriptors(monkeypatch):
    for soft, expected in ((64, 8), (1024, 1024 - SPARE_DESCRIPTORS), (2**20, MAX_CONNECTIONS)):
        monkeypatch.setattr(limits.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert expected - 100 < limits.affordable_connections() <= expected
        assert limits_of(ServerConfig(limit_concurrency=10**6)).max_connections <= expected
    assert limits_of(ServerConfig(limit_concurrency=5)).max_connections == 5


@pytest.mark.slow
def test_a_server_with_few_descriptors(tmp_path):
    """More connections than it may have: it answers, restarts its engine, and its log stays short."""
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    limit = SPARE_DESCRIPTORS + 160
    with Server(
        checkpoint, "--skip-tokenizer-init", "--api-server-count", 1, plain=True, prefix=limited(limit)
    ) as server:
        front_end = psutil.Process(server.process.pid)
        socks = [connect(server.url) for _ in range(limit + 200)]
        time.sleep(1)
        assert server.status() == 200
        assert front_end.num_fds() < limit - SPARE_DESCRIPTORS // 2
        pid = server.kill("engine core 0")
        wait_for(lambda: server.pid("engine core 0") != pid, "a new engine")
        server.wait_healthy()
        time.sleep(2)
        assert len(server.log) < 20_000
        for sock in socks:
            sock.close()
        assert server.status() == 200
        assert server.stop() == 0


@pytest.mark.slow
def test_the_soft_limit_of_descriptors_is_raised(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    with Server(checkpoint, "--skip-tokenizer-init", plain=True, prefix=limited(256, soft_only=True)) as server:
        for process in server.tree():
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            soft, hard = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits).groups()
            assert soft == hard or int(soft) >= 2**20
        assert server.stop() == 0


def limited(limit, soft_only=False):
    """A command to start another one with."""
    return ["/bin/sh", "-c", f'ulimit {"-S " if soft_only else ""}-n {limit}; exec "$@"', "sh"]
