"""POST /tokenize and /detokenize."""

from typing import Any

import pytest

from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import BOS, EOS
from tests.unit.serve.http.conftest import Connect

HI = [{"role": "user", "content": "hi"}]


async def test_a_text(connect: Connect) -> None:
    client = await connect()
    answer = (await client.post("/tokenize", json={"model": "fake", "prompt": "hé"})).json()
    assert answer == {"count": 4, "max_model_len": 256, "tokens": [BOS, *"hé".encode()], "token_strs": None}
    bare = await client.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False, "return_token_strs": True})
    assert bare.json()["token_strs"] == ["h", "\ufffd", "\ufffd"]
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "<s>hé"}


@pytest.mark.parametrize("options", [
    {}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"x": 1}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"add_special_tokens": True},
])  # fmt: skip
async def test_a_conversation_has_the_tokens_that_it_is_run_with(connect: Connect, options: dict[str, Any]) -> None:
    core = FakeCore()
    client = await connect(core, enable_auto_tool_choice=True, tool_call_parser="hermes")
    answer = (await client.post("/tokenize", json={"messages": HI} | options)).json()
    await client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1} | options)
    assert answer["tokens"] == core.seen[0].prompt_token_ids
    assert answer["count"] == len(answer["tokens"])


async def test_a_text_need_not_fit_the_context(connect: Connect) -> None:
    client = await connect()
    assert (await client.post("/tokenize", json={"prompt": "a" * 1000})).json()["count"] == 1001
    too_long = await client.post("/tokenize", json={"prompt": "a" * (256 * 64 + 1)})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": ""}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"), ("/tokenize", {"prompt": "a", "chat_template": "x"},
     "chat_template"), ("/tokenize", {"messages": HI, "chat_template_kwargs": {"tokenize": 1}},
     "chat_template_kwargs"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens"), ("/detokenize", {"tokens": [1.0]}, "tokens"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, path: str, body: dict[str, Any], field: str) -> None:
    answer = await (await connect()).post(path, json=body)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == field


async def test_special_tokens_and_unknown_fields(connect: Connect) -> None:
    client = await connect()
    answer = await client.post("/detokenize", json={"tokens": [104, EOS, 299], "new": 1})
    assert answer.json() == {"prompt": "h</s>"}
    assert answer.headers["x-pagemill-ignored-fields"] == "new"
