"""`LLM` in this process and `pagemill serve` in processes of its own: the same model says the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill import LLM, SamplingParams
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which day is it?"}],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32") as llm:
        yield llm


def test_chats_and_texts_are_those_of_the_server(checkpoint: Path, llm: LLM) -> None:
    """Here a core in this process, there one behind ZMQ and HTTP."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    with running_server(str(checkpoint), "--dtype", "float32", "--served-model-name", "tiny") as server:
        for chat, output in zip(CHATS, llm.chat(CHATS, GREEDY, use_tqdm=False), strict=True):
            body = {"model": "tiny", "messages": chat, **common}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
            assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
            assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
            assert answer["prompt_token_ids"] == output.prompt_token_ids
        prompts = ["ab", "The quick brown fox"]
        body = {"model": "tiny", "prompt": prompts, **common}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        texts = [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert [choice["text"] for choice in answer["choices"]] == texts
