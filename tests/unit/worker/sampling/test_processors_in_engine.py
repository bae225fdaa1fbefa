"""Greedy tokens of engines with processors are those of transformers, on the host and on a device that works ahead. All
requests run together."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=2)

SETTINGS = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 100}
LENGTH = 40
ASKED = {
    "plain": ({}, {}),
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "bias": ({"logit_bias": {7: 3.0, 9: -5.0}}, {"sequence_bias": [[[7], 3.0], [[9], -5.0]]}),
    "both": (
        {"logit_bias": {11: 2.0}, "repetition_penalty": 1.2},
        {"sequence_bias": [[[11], 2.0]], "repetition_penalty": 1.2},
    ),
    "words": ({"bad_words_token_ids": [[5]]}, {"bad_words_ids": [[5]]}),
    "minimum": (
        {"min_tokens": 20, "stop_token_ids": [5, 6, 7, 8]},
        {"min_new_tokens": 20, "eos_token_id": [5, 6, 7, 8]},
    ),
}
"""(our parameters, those of transformers)."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def prompts():
    rng = random.Random(4)
    return {name: [rng.randrange(3, 300) for _ in range(5 + 3 * index)] for index, name in enumerate(ASKED)}


@pytest.fixture(scope="module")
def expected(checkpoint):
    """In float32, with words that the model would write and each request may not."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = {}
    for name, prompt in prompts().items():
        settings = {"eos_token_id": None, "pad_token_id": 0} | ASKED[name][1]
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, **settings)
        found[name] = whole[0, len(prompt) :].tolist()
    return found


def run(checkpoint, platform=None, **settings):
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="float32", **(SETTINGS | settings)))
    client = Client(
        EngineCore(config, UniprocExecutor(Worker(config, platform=platform), overlap=platform is not None))
    )
    for name, prompt in prompts().items():
        client.add(core_request(name, prompt, temperature=0, max_tokens=LENGTH, **ASKED[name][0]))
    client.run()
    return client


@pytest.mark.slow
def test_in_parts(checkpoint, expected):
    assert run(checkpoint).tokens == expected


@pytest.mark.slow
@pytest.mark.usefixtures("plain_kernels")
def test_on_a_device_that_works_ahead(checkpoint, expected):
    assert run(checkpoint, QueuedPlatform(), attention_backend="TORCH_PAGED").tokens == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_request_goes_on_with_its_history(checkpoint, expected, ahead, request):
    if ahead:
        request.getfixturevalue("plain_kernels")
    settings = {"attention_backend": "TORCH_PAGED"} if ahead else {}
    client = run(checkpoint, QueuedPlatform() if ahead else None, num_gpu_blocks_override=10, **settings)
    assert client.stats.num_preemptions > 0
    assert client.tokens == expected
