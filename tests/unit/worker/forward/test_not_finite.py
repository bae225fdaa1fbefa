"""NaN in the network: the request that meets it ends with an error, and no other one notices."""

import random
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.engine_io import FinishReason
from pagemill.model.kernels import ops
from pagemill.worker import build_runner
from pagemill.worker.native.decode_path import NoNativeDecode
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=15)

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.0, "min_tokens": 10, "stop_token_ids": (5,)},
)
EMBEDDING = "model.embed_tokens.weight"


def requests():
    """As many of each kind; prompts of up to three blocks."""
    rng = random.Random(5)
    for index in range(2 * len(SAMPLING)):
        prompt = [rng.randrange(3, 250) for _ in range(1 + 9 * index % 37)]
        yield core_request(str(index), prompt, max_tokens=16, seed=index, **SAMPLING[index % len(SAMPLING)])


def run(checkpoint, wanted, **settings):
    """Few blocks, so that those of ended requests are used again by the others."""
    defaults = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 24, "block_size": 16}
    config = build_config(EngineArgs(str(checkpoint), device="cpu", **(defaults | settings)))
    client = Client(EngineCore(config, UniprocExecutor(Worker(config))))
    for request in wanted:
        client.add(request)
    client.run()
    client.core.check_integrity()
    return client


def with_nan(checkpoint, token):
    """The checkpoint with a row of NaN in its embedding; returns what it was."""
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights[EMBEDDING][token] = torch.nan
    save_file(weights, path, {"format": "pt"})


def in_parts(monkeypatch):
    monkeypatch.setattr(build_runner, "native_decode", lambda *_: NoNativeDecode("in parts"))


def in_torch(monkeypatch):
    in_parts(monkeypatch)
    monkeypatch.setattr(ops, "samples_natively", lambda logits: False)


@pytest.mark.parametrize("simplify", [lambda monkeypatch: None, in_parts, in_torch])
@pytest.mark.parametrize("kind", range(len(SAMPLING)))
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_token_whose_embedding_is_nan(tmp_path, monkeypatch, simplify, kind, dtype):
    """One of the tokens that a request makes becomes NaN where it is read: the request ends there."""
    simplify(monkeypatch)
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=False)
    sound = run(checkpoint, requests(), dtype=dtype)
    seen = Counter(
        token for request in requests() for token in {*request.prompt_token_ids, *sound.tokens[request.request_id]}
    )
    name, place = next(
        (name, place)
        for name in (str(kind), str(kind + len(SAMPLING)))
        for place, token in enumerate(sound.tokens[name][:-1])
        if place > 2 and seen[token] == 1 and token not in sound.tokens[name][:place]
    )
    with_nan(checkpoint, sound.tokens[name][place])
    client = run(checkpoint, requests(), dtype=dtype)
    assert client.finish[name].reason is FinishReason.ERROR
    assert "NaN" in client.finish[name].message
    expected = sound.tokens | {name: sound.tokens[name][: place + 1]}
    assert client.tokens == expected
    assert client.stats.num_running == client.stats.kv_cache_usage == 0


def test_prompts_with_nan_leave_nothing_to_be_found(tmp_path):
    """Blocks of a request that failed are not shared, and do no harm to those who get them next."""
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=False)
    with_nan(checkpoint, 251)
    good = [core_request(f"good {index}", [7 + index] * 40, max_tokens=20, temperature=0.0) for index in range(6)]
    sound = run(checkpoint, good)
    bad = [core_request(f"bad {index}", [70] * 33 + [251] + [7] * 20, temperature=0.0) for index in range(12)]
    client = run(checkpoint, [request for pair in zip(bad, good, strict=False) for request in pair] + bad[6:])
    for request in good:
        name = request.request_id
        assert (client.tokens[name], client.finish[name]) == (sound.tokens[name], sound.finish[name])
    for request in bad:
        name = request.request_id
        assert (client.tokens[name], client.finish[name].reason) == ([], FinishReason.ERROR)
    client.add(again := core_request("again", bad[0].prompt_token_ids, temperature=0.0))
    client.run()
    assert client.cached[again.request_id] == 0
    assert client.stats.kv_cache_usage == 0
