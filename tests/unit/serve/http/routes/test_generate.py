"""POST /generate: texts in, texts out."""

import itertools
import json
from typing import Any

import pytest

from tests.fakes.fake_core import FakeCore, say
from tests.unit.serve.http.conftest import Connect


@pytest.mark.parametrize("prompt", ["ab", list(b"ab")])
async def test_a_prompt_and_what_follows(connect: Connect, prompt: Any) -> None:
    client = await connect(FakeCore(say("cde")))
    answer = await client.post("/generate", json={"prompt": prompt, "max_tokens": 3, "n": 2})
    assert answer.json() == {"text": ["abcde", "abcde"]}


async def test_lines_have_the_texts_so_far(connect: Connect) -> None:
    client = await connect(FakeCore(say("cde")))
    answer = await client.post("/generate", json={"prompt": "ab", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    texts = [json.loads(line)["text"] for line in answer.text.splitlines()]
    assert texts[-1] == ["abcde"]
    assert all(later[0].startswith(former[0]) for former, later in itertools.pairwise(texts))
    several = await client.post("/generate", json={"prompt": "ab", "max_tokens": 3, "n": 3, "stream": True})
    assert json.loads(several.text.splitlines()[-1]) == {"text": ["abcde"] * 3}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_bad_input_is_named(connect: Connect, changes: dict[str, Any], field: str) -> None:
    client = await connect(FakeCore(say("cde")))
    answer = await client.post("/generate", json={"prompt": "ab"} | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
