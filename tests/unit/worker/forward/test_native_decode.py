"""Decode steps as one native call, in the engine: the tokens are those of the step in parts, alone and together."""

import random

import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.model.kernels.native import library
from pagemill.worker import build_runner
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.tiny_checkpoint import PLANNABLE, make_checkpoint
from tests.marks import slow


@pytest.fixture(autouse=True)
def native() -> None:
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")


def requests(**params):
    rng = random.Random(1)
    for index in range(7):
        prompt = [rng.randrange(3, 300) for _ in range(1 + 9 * index % 37)]
        sampling = {"temperature": 0.0} if index % 3 == 0 else {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
        yield core_request(str(index), prompt, **({"max_tokens": 12 + 4 * index, "seed": index} | sampling | params))


def tokens_of(checkpoint, wanted, **settings):
    """Tokens of requests that run together, and how many steps were one call."""
    defaults = {"max_model_len": 128, "max_num_seqs": 5, "num_gpu_blocks_override": 100}
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="bfloat16", **(defaults | settings)))
    worker = Worker(config)
    client = Client(EngineCore(config, UniprocExecutor(worker)))
    forward, num_fused = worker.runner._forward, 0
    decode = forward.decode

    def counted(slots, num_tokens):
        nonlocal num_fused
        result = decode(slots, num_tokens)
        num_fused += result is not None
        return result

    forward.decode = counted
    client.add(*wanted)
    client.run()
    return client.tokens, num_fused


def in_parts(monkeypatch):
    monkeypatch.setattr(build_runner, "_decode_step", lambda *_: None)


@pytest.mark.parametrize("architecture", PLANNABLE)
@pytest.mark.parametrize("settings", [{}, slow({"kv_cache_dtype": "int8"}), slow({"quantization": "int8"})])
def test_every_architecture(tmp_path, monkeypatch, architecture, settings):
    changes = {"final_logit_softcapping": None} if architecture == "Gemma3ForCausalLM" else {}
    checkpoint = make_checkpoint(tmp_path, architecture, **changes)
    found, num_fused = tokens_of(checkpoint, requests(), **settings)
    assert num_fused > 30
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, requests(), **settings) == (found, 0)


@pytest.mark.slow
def test_batch_and_threads_change_nothing(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "MistralForCausalLM")
    together, _ = tokens_of(checkpoint, requests())
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            alone, num_fused = tokens_of(checkpoint, requests(), max_num_seqs=1, cpu_threads=threads)
            assert alone == together
            assert num_fused > 100
    finally:
        torch.set_num_threads(before)


def test_changed_logits_are_left_to_the_sampler(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    wanted = {"min_tokens": 8, "stop_token_ids": tuple(range(2, 200))}
    found, _ = tokens_of(checkpoint, requests(**wanted))
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, requests(**wanted))[0] == found
    assert min(map(len, found.values())) >= 8


def test_capped_logits_run_in_parts(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "Gemma3ForCausalLM")
    assert tokens_of(checkpoint, requests())[1] == 0
