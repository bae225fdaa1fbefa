"""`--reasoning-parser` and a form in one request: what comes before the end of the reasoning is free, and the content
has its form. Over HTTP, whole and streamed, with marks that are control tokens and with marks that are text."""

import json

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.fakes.tiny_checkpoint import byte_tokenizer, make_checkpoint
from tests.integration.server_process import running_server

BEGIN, END = "259", "260"
A, LESS = (str(byte_tokenizer().token_to_id(char)) for char in "a<")
THOUGHT = {"logit_bias": {A: 50, END: 30}, "frequency_penalty": 2}
"""Greedy: some letters, and then the end of the reasoning, which has become likelier."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["first", "second"]}, "done": {"type": "boolean"}, "mark": {"const": "forced"}},
    "required": ["kind", "done", "mark"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BODY = {
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_tokens": 400,
}


@pytest.fixture(
    scope="module",
    params=[("control", "--enable-jump-forward"), ("text", "--no-enable-jump-forward")],
    ids=["control tokens", "text, without jump-forward"],
)
def server(request, tmp_path_factory):
    marks, jump = request.param
    folder = make_checkpoint(tmp_path_factory.mktemp("thinks"), "LlamaForCausalLM")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = tokenizer.add_special_tokens if marks == "control" else tokenizer.add_tokens
    assert add(["<think>", "</think>"]) == 2
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    flags = ("--dtype", "float32", "--cpu-threads", "1", "--reasoning-parser", "qwen3", jump)
    with running_server(str(folder), *flags) as process:
        yield process


def ask(server, **more):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY | more, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]


def streamed(server, **more):
    """The message, put together."""
    found = {}
    body = BODY | more | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for name, text in json.loads(line[6:])["choices"][0]["delta"].items():
                    found[name] = found.get(name, "") + text
    return found


@pytest.mark.parametrize("begins", ["prompt", "model"])
def test_reasoning_is_free_and_the_content_has_its_form(server, begins):
    more = {"response_format": FORMAT, "chat_template_kwargs": {"enable_thinking": True}, **THOUGHT}
    if begins == "model":
        more = {"response_format": FORMAT, **THOUGHT, "logit_bias": THOUGHT["logit_bias"] | {BEGIN: 60}}
    message = ask(server, **more)
    assert "a" in message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert streamed(server, **more) == message


@pytest.mark.parametrize("closes", ["prompt", "model"])
@pytest.mark.parametrize("asked", [{"response_format": FORMAT}, {"guided_json": SCHEMA}])
def test_without_reasoning_the_form_holds_at_once(server, closes, asked):
    more = asked | {"logit_bias": {A: 50, BEGIN: -100, LESS: -100}}
    if closes == "prompt":
        more = asked | {"logit_bias": {A: 50, BEGIN: 100}, "chat_template_kwargs": {"enable_thinking": False}}
    message = ask(server, **more)
    assert "reasoning" not in message
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_what_the_form_says_itself_comes_first(server):
    form = {"choice": ["yes"], "free_until": [int(A)]}
    assert ask(server, structured_outputs=form, logit_bias={A: 100})["content"] == "ayes"


def test_text_completions_have_no_reasoning(server):
    body = {
        "prompt": "Hello<think>",
        "structured_outputs": {"choice": ["yes", "no"]},
        "logit_bias": {A: 50, BEGIN: 100},
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["text"] in ("yes", "no")
