"""Outputs with a form on real workers: the same on the host and on a device that works ahead, one step at a time or
several, with native decode steps and without, and of their form."""

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.model.kernels.native import library
from pagemill.worker.batch.row_masks import LEFT
from pagemill.worker.sampling.sampler import Sampler
from pagemill.worker.worker import Worker
from tests.fakes.byte_vocabulary import END, TABLE, Following, accepts
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.masked_worker import forms, wide_table
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=4)

SETTINGS = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 24}
FORMS = {
    "digits": {"regex": "[0-9]{25}"},
    "object": {
        "json": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer"}},
                 "required": ["kind", "n"], "additionalProperties": False},
        "disable_any_whitespace": True,
    },
    "words": {"regex": "(ab|cd|e){9}"},
}  # fmt: skip
ASKED = {
    "digits": {"temperature": 0.0},
    "free": {"temperature": 0.9},
    "object": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "words": {"temperature": 1.2, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def grammar_of():
    return forms({name: StructuredOutputsParams(**form) for name, form in FORMS.items()}, wide_table())


def run(checkpoint, grammar_of, dtype="float32", platform=None, depth=1, overlap=False, **settings):
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype=dtype, **(SETTINGS | settings)))
    executor = UniprocExecutor(Worker(config, platform=platform), overlap=overlap)
    client = Client(EngineCore(config, executor, depth=None if overlap else depth, grammar_of=grammar_of))
    for seed, (name, params) in enumerate(ASKED.items()):
        client.add(core_request(name, 4 + 9 * seed, seed=seed, max_tokens=40, **params))
    client.run()
    client.core.shutdown()
    return client


def check_forms(client):
    vocabulary = Following()
    for name, form in FORMS.items():
        assert client.finish[name].reason is FinishReason.STOP
        text = b"".join(TABLE.tokens[token] for token in client.tokens[name] if token != END).decode()
        assert accepts(vocabulary, text, **form)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_host(checkpoint, grammar_of, dtype):
    """In bfloat16 most steps are native calls."""
    plain = run(checkpoint, grammar_of, dtype)
    check_forms(plain)
    assert run(checkpoint, grammar_of, dtype, depth=2).tokens == plain.tokens
    assert run(checkpoint, grammar_of, dtype, overlap=True).tokens == plain.tokens
    short = run(checkpoint, grammar_of, dtype, overlap=True, num_gpu_blocks_override=10)
    assert short.stats.num_preemptions > 0
    assert short.tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_chosen_by_their_masks_have_the_tokens_of_changed_logits(checkpoint, grammar_of, monkeypatch, dtype):
    """In bfloat16 by the native call of a decode step, in float32 by that of any other."""
    if library() is None:
        pytest.skip("no kernels here")
    num_rows = []
    masks = Sampler.masks

    def counted(sampler, slots):
        found = masks(sampler, slots)
        num_rows.append(0 if found is None else int((found.rows != LEFT).sum()))
        return found

    monkeypatch.setattr(Sampler, "masks", counted)
    by_masks = run(checkpoint, grammar_of, dtype)
    check_forms(by_masks)
    assert sum(num_rows) > 10
    monkeypatch.setattr(Sampler, "masks", lambda sampler, slots: None)
    assert run(checkpoint, grammar_of, dtype).tokens == by_masks.tokens


@pytest.mark.slow
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("num_blocks", [100, 10])
def test_on_a_device_that_works_ahead(checkpoint, grammar_of, num_blocks):
    plain = run(checkpoint, grammar_of)
    settings = {"attention_backend": "TORCH_PAGED", "num_gpu_blocks_override": num_blocks}
    ahead = run(checkpoint, grammar_of, platform=QueuedPlatform(), overlap=True, **settings)
    assert (ahead.stats.num_preemptions > 0) == (num_blocks == 10)
    assert ahead.tokens == plain.tokens
