"""Tokens that the engine knows for running requests: the model goes on as transformers does, given the same tokens."""

import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

TIE = 2e-3
"""Logits this close are a tie: float32 sums in another order differ by as much."""
PROMPTS = {"short": [5], "long": list(range(20, 61)), "other": list(range(100, 113)), "last": [9, 8, 7]}


@torch.inference_mode()
def check(model, prompt, output, table):
    """Forced tokens are where they belong, and the others the most likely ones after all before them."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    forced = {place + index: token for place, tokens in table.items() for index, token in enumerate(tokens)}
    for place, token in enumerate(output):
        if place in forced:
            assert token == forced[place]
        else:
            assert logits[place].max() - logits[place, token] < TIE, f"token {place}"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", slow("MistralForCausalLM"), slow("Qwen3MoeForCausalLM")])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_model_goes_on_from_forced_tokens(tmp_path, architecture, depth):
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, architecture)
    settings = {"max_model_len": 96, "num_gpu_blocks_override": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    config = build_config(EngineArgs(str(path), device="cpu", dtype="float32", **settings))
    core = EngineCore(
        config, UniprocExecutor(Worker(config)), depth=depth, grammar_of=grammar_of(at_positions(SOME_PLACES))
    )
    client = Client(core)
    client.add(*(core_request(name, prompt, max_tokens=30, temperature=0.0) for name, prompt in PROMPTS.items()))
    client.run()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, prompt in PROMPTS.items():
        assert len(client.tokens[name]) == 30
        check(model, prompt, client.tokens[name], SOME_PLACES)
    core.shutdown()
