"""What generation_config.json recommends is what a request gets that says nothing: as transformers does it, in `LLM`
and over HTTP. Tiny random checkpoint, float32."""

import json

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill import LLM
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

PROMPTS = [[30 + (index * 37) % 200 for index in range(size)] for size in (40, 7)]
LENGTH = 24
RECOMMENDED = {"do_sample": False, "temperature": 0.0, "repetition_penalty": 1.8}
"""A greedy one, whose text can be compared."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return str(folder)


def of_transformers(checkpoint, penalty):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        asked = {"repetition_penalty": penalty, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, **asked)
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_the_models_penalty_is_that_of_transformers(checkpoint):
    expected = of_transformers(checkpoint, RECOMMENDED["repetition_penalty"])
    assert expected != of_transformers(checkpoint, 1.0)
    with LLM(checkpoint, dtype="float32", cpu_threads=1) as llm:
        params = llm.get_default_sampling_params().replace(max_tokens=LENGTH, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    with running_server(checkpoint, "--dtype", "float32", "--cpu-threads", "1") as server:
        asked = {"prompt": PROMPTS, "max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=300).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        answer = httpx.post(f"{server.url}/v1/completions", json=asked | {"repetition_penalty": 1}, timeout=300).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == of_transformers(checkpoint, 1.0)
