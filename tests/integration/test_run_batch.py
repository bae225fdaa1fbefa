"""`pagemill run-batch` on a real engine, a tiny random model: every endpoint below /v1 that a line may name, and lines
that are wrong, each of which gets an answer of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint

LIMIT_S = 300
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


def line(custom_id, url, /, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def answered(folder, checkpoint, lines, *flags):
    """The lines of the output."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines))
    command = [sys.executable, "-m", "pagemill", "run-batch", "-i", source, "-o", target, "--model", checkpoint]
    words = ["--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "4", *flags]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    entries = [json.loads(text) for text in target.read_text().splitlines()]
    assert len(entries) == sum(bool(text.strip()) for text in lines)
    assert len({entry["id"] for entry in entries}) == len(entries)
    return entries


def test_texts_and_wrong_lines(tmp_path, checkpoint):
    greedy = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    lines = [
        line("chat", CHAT, messages=HI, **greedy),
        "{",
        line("chat again", CHAT, messages=HI, **greedy),
        line("schema", CHAT, messages=HI, response_format=form, **greedy | {"max_tokens": 60, "seed": 1}),
        line("text", TEXT, prompt=["ab", "cd"], n=1, **greedy),
        "",
        line("many", TEXT, prompt="ab", n=3, model="tiny", max_tokens=4, seed=3),
        line("other model", CHAT, messages=HI, model="gpt", max_tokens=1),
        line("too hot", CHAT, messages=HI, **greedy | {"temperature": -1}),
        line("too long", TEXT, prompt=[5] * 600, **greedy),
        line("no such endpoint", "/v1/nothing"),
        line("embedding", "/v1/embeddings", input="hello", model="tiny"),
        line("chat", CHAT, messages=HI, **greedy),
        line("stream", CHAT, messages=HI, stream=True, **greedy),
        line("elsewhere", "/metrics"),
        line("response", RESPONSES, input="Hello", model="tiny", max_output_tokens=8, temperature=0),
        line("response of items", RESPONSES, input=HI, model="tiny", max_output_tokens=8, temperature=0),
        line("stored response", RESPONSES, input="Hello", model="tiny", max_output_tokens=8, store=True),
        line("last", CHAT, messages=HI, **greedy),
    ]
    entries = answered(tmp_path, checkpoint, lines)
    names = ["chat", None, *(json.loads(text)["custom_id"] for text in lines[2:] if text)]
    assert [entry["custom_id"] for entry in entries] == names
    repeated = next(entry for entry in reversed(entries) if entry["custom_id"] == "chat")
    assert "that of an earlier line" in repeated["error"]["message"]
    found = {entry["custom_id"]: entry for entry in reversed(entries)}

    def status(name):
        return found[name]["response"]["status_code"]

    def problem(name):
        return found[name]["response"]["body"]["error"]

    whole = found["chat"]["response"]["body"]
    assert (status("chat"), found["chat"]["error"], whole["object"]) == (200, None, "chat.completion")
    assert whole["choices"] == found["last"]["response"]["body"]["choices"], "the same question has the same answer"
    assert whole["usage"]["completion_tokens"] <= 8
    assert found["chat"]["response"]["request_id"]
    response = found["response"]["response"]["body"]
    assert (status("response"), response["object"]) == (200, "response")
    (message,) = response["output"]
    assert message["content"][0]["text"] == whole["choices"][0]["message"]["content"], "it is the same chat"
    assert response["usage"]["output_tokens"] == whole["usage"]["completion_tokens"]
    assert found["response of items"]["response"]["body"]["output"][0]["content"] == message["content"]
    assert (status("stored response"), problem("stored response")["param"]) == (400, "store")
    assert isinstance(json.loads(found["schema"]["response"]["body"]["choices"][0]["message"]["content"])["age"], int)
    assert [choice["index"] for choice in found["text"]["response"]["body"]["choices"]] == [0, 1]
    assert len(found["many"]["response"]["body"]["choices"]) == 3
    assert (status("other model"), status("too hot"), status("too long")) == (404, 400, 400)
    assert "'gpt' is not served" in problem("other model")["message"]
    assert problem("too hot")["param"] == "temperature"
    assert status("no such endpoint") == 404
    assert "--runner pooling" in problem("embedding")["message"]
    for name, part in {"stream": "stream=true", "elsewhere": "url='/metrics'", None: "not a JSON object"}.items():
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "invalid_line"
        assert part in found[name]["error"]["message"]


def test_vectors(tmp_path, checkpoint):
    lines = [
        line("one", "/v1/embeddings", input="hello", model="tiny"),
        line("two", "/v1/embeddings", input=["hello", "there"], model="tiny"),
        line("score", "/v1/score", text_1="hello", text_2="hello", model="tiny"),
        line("wrong", "/v1/embeddings", input=[], model="tiny"),
        line("text", TEXT, prompt="a", model="tiny"),
    ]
    flags = ("--runner", "pooling", "--pooler-config.pooling_type", "MEAN")
    found = {entry["custom_id"]: entry for entry in answered(tmp_path, checkpoint, lines, *flags)}
    bodies = {name: found[name]["response"]["body"] for name in ("one", "two", "score")}
    assert bodies["two"]["data"][0]["embedding"] == pytest.approx(bodies["one"]["data"][0]["embedding"], abs=1e-5)
    assert len(bodies["two"]["data"]) == 2
    assert bodies["score"]["data"][0]["score"] == pytest.approx(1, abs=1e-4)
    assert [found[name]["response"]["status_code"] for name in ("wrong", "text")] == [400, 400]
