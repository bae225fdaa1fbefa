"""Lines about requests and what was generated: no text of a prompt unless it is asked for, and nothing secret."""

import logging

import pytest

from pagemill.config.server_logs import ServerLogs
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.http.request_log import AnswerLog, RequestLog
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import ByteTokenizer

BODY = {"prompt": "SECRET prompt\n", "max_tokens": 3, "stop": ["SECRET stop"], "temperature": 0.5, "seed": 7}


@pytest.fixture
def log(monkeypatch, caplog):
    root = logging.getLogger("pagemill")
    monkeypatch.setattr(root, "propagate", True)
    caplog.set_level(logging.INFO, "pagemill")
    return caplog


async def post(connect, **server):
    client = await connect(FakeCore(), api_key=("KEY",), **server)
    headers = {"authorization": "Bearer KEY", "x-request-id": "mine"}
    answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200
    return answer


async def test_a_request_is_described_without_what_it_says(connect, log):
    await post(connect, enable_log_requests=True)
    (line,) = [message for message in log.messages if message.startswith("request")]
    assert line.startswith("request mine: /v1/completions, 1 prompts of 15 tokens, ")
    assert "temperature=0.5" in line
    assert "seed=7" in line
    assert "stop=<1>" in line
    assert "SECRET" not in log.text
    assert "KEY" not in log.text


async def test_nothing_is_logged_by_default(connect, log):
    await post(connect)
    assert not [message for message in log.messages if "mine" in message]


async def test_the_prompt_at_debug(connect, log):
    log.set_level(logging.DEBUG, "pagemill")
    await post(connect, enable_log_requests=True, max_log_len=13)
    assert "request mine, prompt 0: <s>SECRET pro..." in log.messages


async def test_what_was_generated(connect, log):
    answer = await post(connect, enable_log_requests=True, enable_log_outputs=True)
    (line,) = [message for message in log.messages if message.startswith("answer")]
    text = answer.json()["choices"][0]["text"]
    assert line == f"answer mine 0.0 ended (length, 3 tokens): {text!r}".replace("'", "")


@pytest.mark.parametrize("deltas", [False, True])
async def test_what_was_generated_in_a_stream(connect, log, deltas):
    client = await connect(FakeCore(), enable_log_requests=True, enable_log_outputs=True, enable_log_deltas=deltas)
    await client.post("/v1/completions", json=BODY | {"stream": True}, headers={"x-request-id": "mine"})
    lines = [message for message in log.messages if message.startswith("answer mine 0.0")]
    assert "ended (length, 3 tokens): " in lines[-1]
    assert len(lines) == (3 if deltas else 1)


def delta(text, reason=None):
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [1], reason)], reason is not None)


def test_long_and_broken_answers_are_cut(log):
    answer = RequestLog(ServerLogs(requests=True, outputs=True, max_chars=4), ByteTokenizer()).answer("r")
    assert isinstance(answer, AnswerLog)
    for text in ("ab\n", "cdef", "gh"):
        answer.note(0, delta(text))
    answer.end()
    answer.end()
    assert log.messages == ["answer r 0.0 ended (not finished, 3 tokens): ab\\nc... (5 more characters)"]
