"""The access log: a line for each answer, which nobody can forge."""

import logging

import pytest

from pagemill.serve.http.access_log import AccessLogMiddleware
from tests.fakes.fake_core import FakeCore


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("pagemill"), "propagate", True)
    caplog.set_level(logging.INFO, "pagemill")
    return caplog


def lines(log):
    return [message for message in log.messages if "HTTP/1.1" in message]


async def test_a_line_for_each_answer(connect, log):
    client = await connect(FakeCore(), uvicorn_log_level="info", api_key=("KEY",))
    await client.get("/v1/models?token=SECRET", headers={"authorization": "Bearer KEY", "x-request-id": "mine"})
    await client.get("/v1/models", headers={"x-request-id": "other"})
    first, second = lines(log)
    assert first.startswith('127.0.0.1:123 "GET /v1/models HTTP/1.1" 200 ')
    assert first.endswith(" ms mine")
    assert '"GET /v1/models HTTP/1.1" 401 ' in second
    assert "SECRET" not in log.text
    assert "KEY" not in log.text


@pytest.mark.parametrize("server", [
    {}, {"uvicorn_log_level": "info", "disable_uvicorn_access_log": True},
    {"uvicorn_log_level": "info", "disable_access_log_for_endpoints": "/ping,/health"},
])  # fmt: skip
async def test_no_line_where_none_is_wanted(connect, log, server):
    client = await connect(FakeCore(), **server)
    assert (await client.get("/health")).status_code == 200
    assert lines(log) == []


async def test_errors_are_told_with_their_place(connect, log):
    client = await connect(FakeCore(), log_error_stack=True)
    await client.post("/v1/completions", json={"prompt": "a", "temperature": -1}, headers={"x-request-id": "mine"})
    (line,) = [message for message in log.messages if message.startswith("request mine gets 400: RequestError")]
    assert line.isprintable()
    assert "temperature=-1" in line
    assert ".py:" in line


async def ask(app, scope):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    await AccessLogMiddleware(app)(scope, receive, send)


def scope_of(raw_path, client=("1.2.3.4", 5)):
    return {
        "type": "http", "method": "GET", "path": raw_path.decode("latin-1"), "raw_path": raw_path, "client": client,
        "http_version": "1.1",
    }  # fmt: skip


@pytest.mark.parametrize("raw_path", [b"/a\x1b[2J", b'/" 200 1 ms\n', b"/\xff\x85", b"/" + b"a" * 60_000])
async def test_no_path_breaks_its_line(log, raw_path):
    async def silent(scope, receive, send):
        pass

    await ask(silent, scope_of(raw_path, client=("evil\x1bproxy" * 99, 5)))
    (line,) = lines(log)
    assert line.isprintable()
    assert len(line) < 500
    assert line.count('"') == 2
    assert '" - ' in line


async def test_an_answer_that_broke_off_has_a_line_too(log):
    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await ask(failing, scope_of(b"/x", client=None))
    (line,) = lines(log)
    assert line.startswith('- "GET /x HTTP/1.1" 200 ')
