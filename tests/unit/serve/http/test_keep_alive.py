"""Streams that say that they are alive while nothing is generated."""

import json
import time
from typing import Any

import httpx
import pytest

from pagemill.messages.engine_io import EngineCoreOutputs
from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore

CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "stream": True}
COMMENT = ": keep-alive"


class Held(FakeCore):
    """Gives `num_free` steps' tokens, then none until it is let go."""

    def __init__(self, num_free: int = 0, fail: bool = False) -> None:
        super().__init__()
        self.num_free = num_free
        self.fails = fail
        self.is_held = True

    def step(self) -> list[EngineCoreOutputs]:
        if self.is_held and self.num_free <= 0:
            time.sleep(0.002)
            return [EngineCoreOutputs()]
        self.num_free -= 1
        if self.fails:
            raise RuntimeError("the device fell off the bus")
        return super().step()


def lines_of(core: Held, path: str, body: dict[str, Any], until: str, count: int = 1) -> tuple[int, list[str]]:
    """Status and lines of a stream; the core is let go after `count` lines that begin with `until`."""
    lines = []
    with (
        running_server(core, sse_keep_alive_interval=0.02) as url,
        httpx.stream("POST", url + path, json=body, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            lines.append(line)
            count -= line.startswith(until)
            if not count:
                core.is_held = False
    return answer.status_code, lines


def texts(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.mark.parametrize("num_free", [0, 2])
def test_while_a_request_waits_and_between_tokens(num_free: int) -> None:
    status, lines = lines_of(Held(num_free), "/v1/chat/completions", CHAT, COMMENT)
    assert status == 200
    assert COMMENT in lines
    assert (lines.index(COMMENT) == 0) is (num_free == 0)
    assert lines[lines.index(COMMENT) + 1] == "", "a comment ends as an event does"
    assert len(texts(lines)) == 4
    assert lines[-2] == "data: [DONE]"


@pytest.mark.slow
def test_anthropics_clients_get_pings() -> None:
    _, lines = lines_of(Held(2), "/v1/messages", CHAT, "event: ping", count=2)
    kinds = [line for line in lines if line.startswith("event: ")]
    assert kinds[0] == "event: message_start"
    assert kinds.count("event: ping") > 1, "one comes with the beginning anyway"
    assert kinds[-1] == "event: message_stop"
    assert COMMENT not in lines
    _, waiting = lines_of(Held(), "/v1/messages", CHAT, COMMENT)
    assert next(line for line in waiting if line.startswith("event: ")) == "event: message_start"


def test_lines_of_json_have_no_comments() -> None:
    core = Held(2)
    lines = []
    with (
        running_server(core, sse_keep_alive_interval=0.001) as url,
        httpx.stream("POST", f"{url}/api/chat", json=CHAT | {"model": "fake"}, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            lines.append(json.loads(line))
            core.is_held = False
    assert lines[-1]["done"]


def test_what_goes_wrong_after_a_comment_is_an_event() -> None:
    status, lines = lines_of(Held(fail=True), "/v1/chat/completions", CHAT, COMMENT)
    assert status == 200
    (error,) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert error["error"]["code"] == "engine_dead"


def test_zero_is_never() -> None:
    with running_server(FakeCore(step_s=0.001), sse_keep_alive_interval=0.0) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=120)
    assert COMMENT not in answer.text
