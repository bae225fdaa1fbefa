"""Routes beside OpenAI's on `pagemill serve` with a real engine: several API servers, a tiny random model."""

import json
import threading
import time

import anthropic
import httpx
import ollama
import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

KEY = {"x-api-key": "k"}
NAMES = ("--served-model-name", "org/tiny", "tiny", "--model-alias", "claude-*=default")
HI = [{"role": "user", "content": "Hello"}]
LONG = "word " * 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))
    patch = pytest.MonkeyPatch()
    patch.setenv("PAGEMILL_SERVER_DEV_MODE", "1")
    # Two API servers: what one of them is told about the engine holds for the other.
    flags = ("--dtype", "float32", "--api-key", "k", "--api-server-count", "2")
    with running_server(checkpoint, *flags, *NAMES) as process:
        yield process
    patch.undo()


def ask(server, method, path, headers=None, **options):
    return httpx.request(method, server.url + path, headers=KEY | (headers or {}), timeout=60, **options)


def test_anthropics_client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        body = {"model": "claude-x", "max_tokens": 8, "messages": HI, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            assert stream.get_final_message().content[0].text == whole.content[0].text
        assert whole.model == "org/tiny"
        counted = client.messages.count_tokens(model="claude-x", messages=HI).input_tokens
        usage = whole.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_ollamas_client(server):
    with ollama.Client(host=server.url, headers={"authorization": "Bearer k"}) as client:
        options = {"temperature": 0, "num_predict": 8}
        whole = client.chat("tiny:latest", messages=HI, options=options)
        parts = client.chat("tiny", messages=HI, options=options, stream=True)
        assert "".join(part.message.content for part in parts) == whole.message.content
        assert client.ps().models[0].size > 0


def test_large_bodies_are_prepared_by_a_helper(server):
    """Those of every kind: nothing of them is parsed on the event loop."""
    tokens = ask(server, "POST", "/tokenize", json={"prompt": "a" * 2000, "padding": LONG}).json()["tokens"]
    assert len(tokens) == ask(server, "POST", "/tokenize", json={"prompt": "a" * 2000}).json()["count"]
    padded = {"max_tokens": 2, "messages": HI, "padding": LONG}
    assert ask(server, "POST", "/v1/messages", json=padded).json()["type"] == "message"
    assert ask(server, "POST", "/v1/messages/count_tokens", json=padded).json()["input_tokens"] > 0
    chat = {"model": "tiny", "messages": HI, "options": {"num_predict": 2}, "padding": LONG, "stream": False}
    assert ask(server, "POST", "/api/chat", json=chat).json()["done"]
    wrong = ask(server, "POST", "/v1/messages", json=padded | {"model": "other"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    named = ask(server, "POST", "/api/chat", json=chat | {"options": {"temperature": -1}})
    assert named.json()["error"].startswith("options.temperature=-1")


def test_settings_are_told_without_the_key(server):
    info = ask(server, "GET", "/server_info")
    assert info.json()["config"]["model"]["dtype"] == "float32"
    assert info.json()["config"]["server"]["served_model_name"] == ["org/tiny", "tiny"]
    assert "api_key" not in info.text
    assert httpx.get(f"{server.url}/server_info").status_code == 401


def test_a_pause_holds_requests_of_every_api_server(server):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    plain = ask(server, "POST", "/v1/completions", json=body).json()["choices"]
    assert ask(server, "POST", "/pause?mode=keep").json() == {"status": "paused"}
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "POST", "/v1/completions", json=body).json()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while ask(server, "GET", "/load").json()["server_load"] < 4:
        time.sleep(0.01)
    assert ask(server, "GET", "/is_paused").json() == {"is_paused": True}
    assert not answers
    assert httpx.get(f"{server.url}/health").status_code == 200
    ask(server, "POST", "/resume")
    for thread in threads:
        thread.join(60)
    assert [answer["choices"] for answer in answers] == [plain] * 4


def test_requests_of_every_api_server_are_ended(server):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    ask(server, "POST", "/pause?mode=keep")
    answers = []

    def run(name):
        answers.append(ask(server, "POST", "/v1/completions", json=body, headers={"x-request-id": name}).json())

    threads = [threading.Thread(target=run, args=(f"held-{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    while ask(server, "GET", "/load").json()["server_load"] < 6:
        time.sleep(0.01)
    ask(server, "POST", "/abort_requests", json={"request_ids": [f"cmpl-held-{n}" for n in range(3)]})
    while ask(server, "GET", "/load").json()["server_load"] > 3:
        time.sleep(0.01)
    assert ask(server, "POST", "/pause?mode=abort").json() == {"status": "paused"}
    for thread in threads:
        thread.join(60)
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 6
    ask(server, "POST", "/resume")
    assert ask(server, "POST", "/v1/completions", json=body).json()["choices"][0]["finish_reason"] == "length"


def test_cached_prefixes_are_forgotten(server):
    body = {"prompt": list(range(5, 105)), "max_tokens": 1}

    def cached():
        usage = ask(server, "POST", "/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert ask(server, "POST", "/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_rendered_tokens_are_those_that_run(server):
    rendered = ask(server, "POST", "/v1/chat/completions/render", json={"messages": HI}).json()
    text = ask(server, "POST", "/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"]
    assert "Hello" in text
    counted = ask(server, "POST", "/tokenize", json={"messages": HI}).json()
    assert counted["tokens"] == rendered["token_ids"]
    assert json.dumps(counted["tokens"]) in ask(server, "POST", "/tokenize", json={"messages": HI}).text.replace(
        ",", ", "
    )
