"""POST /infill with a real engine: a tiny random model whose vocabulary has tokens to fill in with."""

import json

import httpx
import pytest
import torch
import transformers
from tokenizers import AddedToken

from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_inproc
from tests.fakes.engine import make_app
from tests.fakes.tiny_checkpoint import byte_tokenizer, make_checkpoint

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
BODY = {
    "input_prefix": "def add(a, b):\n    return ",
    "input_suffix": "\n\nprint(add(1, 2))  # <|fim_middle|>\n",
    "input_extra": [{"filename": "sub.py", "text": "def sub(a, b):\n    return a - b\n"}],
    "prompt": "a",
    "temperature": 0,
    "n_predict": 24,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("fills"), "Qwen2ForCausalLM", seed=3)
    tokenizer = byte_tokenizer()
    # Ordinary tokens, as in the files of Qwen2.5-Coder.
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompt_of(tokenizer):
    """The repository's form, put together by hand; what a text spells are bytes."""
    prefix, suffix, middle, repository, file = (tokenizer.token_to_id(name) for name in NAMES)

    def plain(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    spelled = [token for half in ("<|fim_mid", "dle|>") for token in plain(half)]
    head = [repository, *plain("myproject\n"), file, *plain("sub.py\ndef sub(a, b):\n    return a - b\n")]
    before = [file, *plain("filename\n"), prefix, *plain("def add(a, b):\n    return ")]
    after = [suffix, *plain("\n\nprint(add(1, 2))  # "), *spelled, *plain("\n"), middle, *plain("a")]
    return [*head, *before, *after]


@pytest.fixture
async def client(checkpoint):
    engine = build_inproc(EngineArgs(str(checkpoint), dtype="float32", max_model_len=512)).llm
    try:
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            yield client
    finally:
        await engine.shutdown()


async def test_the_gap_is_filled_as_by_transformers(client, checkpoint):
    tokenizer = byte_tokenizer().from_file(str(checkpoint / "tokenizer.json"))
    ids = prompt_of(tokenizer)
    model = transformers.Qwen2ForCausalLM.from_pretrained(checkpoint).eval()
    ends = [2, *(tokenizer.token_to_id(name) for name in NAMES[3:])]
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=ends)
    expected = found[0, len(ids) :].tolist()

    whole = (await client.post("/infill", json=BODY | {"return_tokens": True})).json()
    assert whole["tokens"] == expected
    assert whole["tokens_evaluated"] == len(ids)
    assert whole["prompt"] == tokenizer.decode(ids, skip_special_tokens=False)
    assert whole["stop_type"] == ("eos" if expected[-1] in ends else "limit")

    streamed = await client.post("/infill", json=BODY | {"stream": True, "return_tokens": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line]
    assert [token for event in events for token in event["tokens"]] == expected
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["timings"]["cache_n"] > 0, "the prompt is in the cache by now"


async def test_a_form_holds_in_the_gap(client):
    answer = (await client.post("/infill", json=BODY | {"prompt": "", "json_schema": {"type": "boolean"}})).json()
    assert answer["content"] in ("true", "false")
    grammar = 'root ::= "left" | "right"'
    answer = (await client.post("/infill", json=BODY | {"prompt": "", "grammar": grammar})).json()
    assert answer["content"] in ("left", "right")
