"""curl: each dialect as its own documentation asks for it. Ollama's examples send no content type, so that curl says
the body is a form's; OpenAI's and Anthropic's say what it is."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

LIMIT_S = "60"
HI = [{"role": "user", "content": "why is the sky blue?"}]
JSON = ("-H", "Content-Type: application/json")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(FakeCore(say("So it is.", EOS))) as url:
        yield url


def curl(url, *words, data=None):
    """Status and body."""
    body = [] if data is None else ["-d", json.dumps(data)]
    command = ["curl", "-sS", "--max-time", LIMIT_S, "-w", "\n%{http_code}", *words, *body, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def ndjson(text):
    return [json.loads(line) for line in text.splitlines() if line]


@pytest.mark.parametrize("words", [(), JSON], ids=["a form's type", "json"])
def test_ollama_streams_lines(url, words):
    status, text = curl(f"{url}/api/chat", *words, data={"model": "fake", "messages": HI})
    lines = ndjson(text)
    assert status == 200
    assert "".join(line["message"]["content"] for line in lines) == "So it is."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    status, text = curl(f"{url}/api/generate", *words, data={"model": "fake", "prompt": "Why?", "raw": True})
    assert "".join(line["response"] for line in ndjson(text)) == "So it is."


def test_ollama_in_one_piece(url):
    body = {"model": "fake", "prompt": "Why?", "stream": False, "options": {"seed": 1, "temperature": 0}}
    status, text = curl(f"{url}/api/generate", data=body)
    assert (status, json.loads(text)["done"]) == (200, True)
    status, text = curl(f"{url}/api/chat", data={"model": "fake", "messages": HI, "stream": False})
    assert json.loads(text)["message"]["content"] == "So it is."


def test_ollama_has_models(url):
    assert json.loads(curl(f"{url}/api/tags")[1])["models"][0]["name"].startswith("fake")
    assert "details" in json.loads(curl(f"{url}/api/show", data={"model": "fake"})[1])
    assert json.loads(curl(f"{url}/api/ps")[1])["models"]
    assert json.loads(curl(f"{url}/api/version")[1])["version"]
    status, text = curl(f"{url}/api/chat", data={"model": "gpt", "messages": HI})
    assert (status, "gpt" in json.loads(text)["error"]) == (404, True)


def test_a_forms_type_with_an_origin_is_refused(url):
    """What a page of another site could make a browser send."""
    status, _ = curl(f"{url}/api/chat", "-H", "Origin: https://evil.example", data={"model": "fake", "messages": HI})
    assert status == 403
    status, _ = curl(f"{url}/v1/chat/completions", data={"messages": HI})
    assert status == 415


def test_openais_dialect(url):
    words = (*JSON, "-H", "Authorization: Bearer none")
    status, text = curl(f"{url}/v1/chat/completions", *words, data={"model": "fake", "messages": HI})
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "So it is.")
    _, text = curl(f"{url}/v1/chat/completions", "-N", *words, data={"messages": HI, "stream": True})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == "So it is."


def test_anthropics_dialect(url):
    words = (*JSON, "-H", "x-api-key: none", "-H", "anthropic-version: 2023-06-01")
    body = {"model": "fake", "max_tokens": 20, "messages": HI}
    status, text = curl(f"{url}/v1/messages", *words, data=body)
    assert (status, json.loads(text)["content"][0]["text"]) == (200, "So it is.")
    _, text = curl(f"{url}/v1/messages", "-N", *words, data=body | {"stream": True})
    assert [line for line in text.splitlines() if line.startswith("event: ")][-1] == "event: message_stop"
