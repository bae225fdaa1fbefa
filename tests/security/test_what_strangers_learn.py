"""What a server says about itself: nothing to those without a key, and no paths and addresses to anybody
(CVE-2026-22778, CVE-2026-54236, CVE-2026-73555)."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.serve.async_llm import AsyncLLM
from tests.fakes import engine as fakes
from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore
from tests.security.raw import answer_to, statuses
from tests.security.test_keys import PUBLIC

SECRET = "/srv/models/secret-model.gguf"
REASON = f"""engine 1 is down: {SECRET} cannot be read: No such file
Traceback (most recent call last):
  File "{SECRET}.py", line 5, in f at 0x7f3a5c001230
RuntimeError: tcp://10.0.0.7:41231; engine 0 is down: it is being restarted"""
INTERNALS = re.compile(r"secret|/srv|\.py|Traceback|0x[0-9a-f]{4,}|tcp://|10\.0\.0")


@pytest.mark.parametrize(("problem", "told"), [
    (REASON, "engine 1 is down"),
    (f"engine 1 is down: {SECRET} is gone; engine 0 is down: it is being restarted",
     "engine 1 is down; engine 0 is down: it is being restarted"),
    ("engine 0 is down: it is being restarted, 3 attempts in a row failed",
     "engine 0 is down: it is being restarted, 3 attempts in a row failed"),
    ("engine 0 cannot be reached: tcp://10.0.0.1:5 is silent", "engine 0 cannot be reached"),
    ("engine 0 has work and finishes no step", "engine 0 has work and finishes no step"),
    (f"{SECRET} is damaged", "the engine is not running"),
    ("", "the engine is not running"),
])  # fmt: skip
def test_health_does_not_say_why(monkeypatch, problem, told):
    monkeypatch.setattr(AsyncLLM, "problem", lambda self: problem)
    monkeypatch.setattr(AsyncLLM, "accepts", lambda self: False)
    with running_server(FakeCore(), api_key=("k",)) as url:
        for path in ("/health", "/ping", "/health/ready"):
            answer = httpx.get(url + path)
            assert answer.status_code == 503
            assert not INTERNALS.search(answer.text)
            if problem or path != "/health/ready":
                assert answer.json()["error"]["message"] == told


@pytest.mark.parametrize(("name", "path", "shown"), [
    (SECRET, SECRET, "secret-model.gguf"),
    ("models/secret", "models/secret", "secret"),
    ("./secret", "/here/secret", "secret"),
    ("org/model", "/cache/hub/models--org--model/snapshots/1", "org/model"),
    ("smollm2", "/cache/smollm2.gguf", "smollm2"),
])  # fmt: skip
def test_metrics_do_not_say_where_the_model_is(monkeypatch, name, path, shown):
    monkeypatch.setattr(fakes, "FACTS", dataclasses.replace(fakes.FACTS, name=name, path=path))
    with running_server(FakeCore(), api_key=("k",)) as url:
        httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"authorization": "Bearer k"}
        )
        text = httpx.get(f"{url}/metrics").text
        assert set(re.findall(r'model_name="([^"]*)"', text)) == {shown}
        assert "/srv" not in text
        models = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer k"}).json()
        assert models["data"][0]["id"] == name, "clients of the API call the model what the server was told"


def test_public_routes_say_nothing_of_the_machine():
    with running_server(FakeCore(), api_key=("k",)) as url:
        for path in PUBLIC - {"/", "/static/{name}"}:
            answer = httpx.get(url + path)
            assert not re.search(r"0x[0-9a-f]{4,}|Traceback|/nowhere|site-packages", answer.text)
            assert "server" not in answer.headers


def test_methods_and_paths_are_no_labels_of_metrics():
    """Nor anything else that a stranger chooses (CVE-2026-105759)."""
    with running_server(FakeCore()) as url:
        before = httpx.get(f"{url}/metrics").text
        for number in range(20):
            httpx.request(f"X{number}", f"{url}/p{number}", verify=False)
            answer_to(url, f"M{number} /p{number} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert len(httpx.get(f"{url}/metrics").text.splitlines()) == len(before.splitlines())


ERRORS = json.loads(re.search(
    r"```json\n(\[.*?\])\n```", (Path(__file__).parents[2] / "docs/http-api.md").read_text().split("## Errors")[1], re.S
)[1])  # fmt: skip


@pytest.mark.parametrize("example", ERRORS, ids=lambda example: str(example["status"]))
def test_the_errors_of_the_documentation_are_those_that_are_sent(example):
    with running_server(FakeCore(), api_key=("k",)) as url:
        headers = {"authorization": "Bearer k"} | example.get("headers", {})
        method, path = example["request"].split()
        content = json.dumps(example["body"]) if "body" in example else None
        if content is not None:
            headers = {"content-type": "application/json"} | headers
        answer = httpx.request(method, url + path, content=content, headers=headers)
    assert (answer.status_code, answer.json()) == (example["status"], example["answer"])


def test_the_log_does_not_say_what_was_sent(caplog):
    """Neither prompts nor answers, nor what was wrong with them, at any level."""
    word = "xyzzyplugh"
    caplog.set_level(logging.DEBUG)
    with running_server(FakeCore()) as url:
        assert word in httpx.post(f"{url}/v1/completions", json={"prompt": word, "max_tokens": 20}).text
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
            httpx.post(url + path, json={"messages": [{"role": "user", "content": word}], "max_tokens": 5, "n": word})
            httpx.post(url + path, content=f'{{"prompt": "{word}', headers={"content-type": "application/json"})
    assert word not in caplog.text


def test_answers_of_the_protocol_are_errors_too():
    with running_server(FakeCore()) as url:
        answer = answer_to(url, b"GET / HTTP/9.9\r\n\r\n")
        assert statuses(answer) == [400]
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def test_defaults_are_those_of_a_private_server():
    assert (ServerConfig().host, ServerConfig().api_key, ServerConfig().allowed_origins) == ("127.0.0.1", None, None)
