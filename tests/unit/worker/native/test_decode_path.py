"""Decode steps as one native call, in the engine: the tokens are those of the step in parts, alone and together."""

import random

import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.scheduler.scheduler import no_grammar
from pagemill.launch import build_config
from pagemill.model.kernels.native import library
from pagemill.worker import build_runner
from pagemill.worker.native.decode_path import NoNativeDecode
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import PLANNABLE, make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_states import STATES
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=8)


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
    tokens, most = run(checkpoint, wanted, **settings)
    return tokens, len(most)


def run(checkpoint, wanted, *, depth=1, grammar_of=no_grammar, speculation=None, **settings):
    """Tokens of requests that run together, and of each step that was one call the most tokens that a request had."""
    defaults = {"max_model_len": 128, "max_num_seqs": 5, "num_gpu_blocks_override": 100, "spec_method": "none"}
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="bfloat16", **(defaults | settings)))
    worker = Worker(config, speculation=speculation)
    client = Client(EngineCore(config, UniprocExecutor(worker), depth=depth, grammar_of=grammar_of))
    forward = worker.runner._forward
    decode = forward.decode
    most = []

    def counted(slots, num_tokens):
        result = decode(slots, num_tokens)
        if result is not None:
            most.append(int(num_tokens.max()))
        return result

    forward.decode = counted
    client.add(*wanted)
    client.run()
    return client.tokens, most


def in_parts(monkeypatch):
    monkeypatch.setattr(build_runner, "native_decode", lambda *_: NoNativeDecode("in parts"))


@pytest.mark.cases(one_in=len(PLANNABLE))
@pytest.mark.parametrize("architecture", PLANNABLE)
@pytest.mark.parametrize("settings", [{}, slow({"kv_cache_dtype": "int8"}), slow({"quantization": "int8"})])
def test_every_architecture(tmp_path, monkeypatch, architecture, settings):
    checkpoint = make_checkpoint(tmp_path, architecture)
    found, num_fused = tokens_of(checkpoint, requests(), **settings)
    assert num_fused > 30
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, requests(), **settings) == (found, 0)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("granite", {}),
        slow("exaone4", {}),
        ("gemma4", {}),
        slow("gemma4", {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None}),
        slow("gemma4", {"vocab_size_per_layer_input": 200}),
        slow("gemma4-key-is-value", {}),
        ("gemma3n", {}),
        ("phi", {}),
        slow("granite-biases", {}),
        slow("gemma3n-alone", {}),
        slow("olmo2", {}),
        ("olmo3", {}),
        ("qwen2-moe", {}),
        slow("glm4-moe", {}),
        ("gpt-oss", {}),
        ("bloom", {}),
        slow("stablelm-12b", {}),
        ("deepseek-v2", {}),
        slow("deepseek-v3", {}),
        ("llama4", {}),
        slow("llama4-two-experts", {}),
        ("phi-qk-norm", {}),
        ("gemma4-experts", {}),
    ],
)
def test_families_with_more_than_the_usual(tmp_path, monkeypatch, family, more):
    """Granite's logits have a factor; tokens of Gemma 4 and 3n have vectors beside their embeddings, and layers read
    the keys and values of others, or make both of one; heads of Phi have a bias, and so have gates of some models of
    Granite; OLMo 2 has norms over all heads, Qwen2-MoE an MLP beside experts, DeepSeek
    latent vectors, Llama 4 norms behind rotary embedding and queries that grow."""
    architecture, changes = FAMILIES[family]
    changes = changes | more
    checkpoint = make_checkpoint(tmp_path, architecture, **changes)
    found, num_fused = tokens_of(checkpoint, requests())
    assert num_fused > 30
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, requests()) == (found, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma4-key-is-value", {"quantization": "int8"}),
        ("gemma3n", {"quantization": "int8"}),
        ("gemma3n", {"kv_cache_dtype": "int8"}),
        ("olmo3", {"quantization": "int8"}),
        ("olmo3", {"kv_cache_dtype": "int8"}),
        ("deepseek-v3", {"quantization": "int8"}),
        ("llama4", {"quantization": "int8"}),
        ("llama4", {"kv_cache_dtype": "int8"}),
        ("gemma4-experts", {"quantization": "int8"}),
        ("phi-qk-norm", {"kv_cache_dtype": "int8"}),
    ],
)
def test_families_in_integers(tmp_path, monkeypatch, family, settings):
    architecture, changes = FAMILIES[family]
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


@pytest.mark.slow
def test_changed_logits_are_left_to_the_sampler(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    wanted = {"min_tokens": 8, "stop_token_ids": tuple(range(2, 200))}
    found, _ = tokens_of(checkpoint, requests(**wanted))
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, requests(**wanted))[0] == found
    assert min(map(len, found.values())) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "special",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "logit_bias": {250: 4.0}},
    ],
)
def test_one_request_whose_logits_are_changed_takes_no_other_off_the_native_path(tmp_path, monkeypatch, special):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    asking = {"min_tokens": 30, "max_tokens": 30, "stop_token_ids": tuple(range(2, 200))}
    one = core_request("special", [5, 6, 7], **special, **asking)
    plain = core_request("special", [5, 6, 7], temperature=0.0, max_tokens=30)
    found, num_fused = tokens_of(checkpoint, [one, *requests()])
    expected, num_plain = tokens_of(checkpoint, [plain, *requests()])
    assert num_fused == num_plain > 30
    assert not set(found["special"]) & set(asking["stop_token_ids"])
    assert found | {"special": []} == expected | {"special": []}
    in_parts(monkeypatch)
    assert tokens_of(checkpoint, [one, *requests()]) == (found, 0)


@pytest.mark.slow
def test_why_a_step_is_not_one_call_is_logged_once(tmp_path, caplog):
    architecture, changes = STATES["mamba"]
    checkpoint = make_checkpoint(tmp_path, architecture, **changes)
    with caplog.at_level("INFO", "pagemill"):
        assert tokens_of(checkpoint, requests())[1] == 0
    said = [record.getMessage() for record in caplog.records if "one native call" in record.getMessage()]
    assert len(said) == 1
    assert "Call reads part of what another operation gives" in said[0]


def test_other_reasons(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pagemill.worker.native.decode_step.MAX_ROWS", 2)
    with caplog.at_level("INFO", "pagemill"):
        assert tokens_of(make_checkpoint(tmp_path, "LlamaForCausalLM"), requests())[1] > 0
    said = [record.getMessage() for record in caplog.records if "one native call" in record.getMessage()]
    assert len(said) == 1
    assert "requests" in said[0]


def alike(prefix_len):
    """Requests whose prompts begin with the same tokens; two at a time, so that some find them in the cache."""
    prefix = [3 + place % 290 for place in range(prefix_len)]
    for request in requests(max_tokens=24):
        ids = [*prefix, *request.prompt_token_ids[:9]]
        yield core_request(request.request_id, ids, **{"max_tokens": 24, "temperature": 0.9, "seed": 3})


@pytest.mark.parametrize("depth", [1, slow(2)])
@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        (requests, {}),
        # Parts of prompts beside requests that decode.
        slow(requests, {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 6}),
        # Some are preempted.
        slow(requests, {"num_gpu_blocks_override": 10}),
        # Prompts that are in the cache, but for their ends.
        slow(lambda: alike(48), {"max_num_seqs": 2, "enable_prefix_caching": True}),
        slow(requests, {"kv_cache_dtype": "int8"}),
    ],
    ids=["plain", "chunks", "preempted", "cached", "int8"],
)
def test_tokens_that_the_engine_knows(tmp_path, monkeypatch, depth, wanted, settings):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    given = {"depth": depth, "grammar_of": grammar_of(at_positions(SOME_PLACES)), **settings}
    found, most = run(checkpoint, wanted(), **given)
    assert most.count(1) > 10
    assert any(2 <= count <= 8 for count in most), "stretches that are forced take part"
    assert all(tokens[5:8] == SOME_PLACES[5] for tokens in found.values())
    in_parts(monkeypatch)
    assert run(checkpoint, wanted(), **given) == (found, [])


@pytest.mark.slow
def test_known_tokens_that_are_scored_run_in_parts(tmp_path, monkeypatch):
    """Hidden states of all of them are wanted; steps of one token each take the native path all the same."""
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    given = {"grammar_of": grammar_of(at_positions(SOME_PLACES))}
    found, most = run(checkpoint, requests(logprobs=1), **given)
    assert set(most) == {1}
    in_parts(monkeypatch)
    assert run(checkpoint, requests(logprobs=1), **given) == (found, [])


DRAFTED = [
    ({}, {}),
    # Parts of prompts beside requests that decode.
    slow({"max_num_batched_tokens": 12, "long_prefill_token_threshold": 6}, {}),
    # Some are preempted.
    slow({"num_gpu_blocks_override": 10}, {}),
    slow({"kv_cache_dtype": "int8"}, {}),
    # One that is left to the sampler beside those with drafts.
    slow({}, {"logprobs": 1}),
    slow({"grammar_of": grammar_of(at_positions(SOME_PLACES))}, {}),
]


@pytest.mark.parametrize("depth", [1, slow(2)])
@pytest.mark.parametrize(("settings", "special"), DRAFTED)
def test_drafts_are_verified_in_one_call(tmp_path, monkeypatch, depth, settings, special):
    """The tokens are those without drafts, and those of drafts that a batch verifies."""
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    one = core_request("special", [5, 6, 7], temperature=0.0, max_tokens=30, **special)
    given = {"depth": depth, **settings}
    plain, most_plain = run(checkpoint, [one, *requests()], **given)
    asked = {request.request_id: list(request.prompt_token_ids) for request in (one, *requests())}
    with toy_proposer():
        TEXTS[:] = [[*prompt, *plain[name]] for name, prompt in asked.items()]
        speculation = Speculation("toy", 4, adaptive=False)
        found, most = run(checkpoint, [one, *requests()], speculation=speculation, **given)
        assert found == plain
        if depth == 1 or "grammar_of" not in settings:  # drafts after a token in flight are not verified
            assert max(most) >= 4
            assert len(most) < len(most_plain)
        in_parts(monkeypatch)
        assert run(checkpoint, [one, *requests()], speculation=speculation, **given) == (plain, [])


@pytest.mark.slow
def test_drafts_of_changed_logits_are_verified_by_a_batch(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    prompt = [5, 6, 7, 8, 9, 10, 11]  # longer than a token and its drafts
    asked = {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 30}
    plain, most_plain = run(checkpoint, [core_request("0", prompt, **asked)])
    with toy_proposer():
        TEXTS[:] = [[*prompt, *plain["0"]]]
        speculation = Speculation("toy", 4, adaptive=False)
        found, most = run(checkpoint, [core_request("0", prompt, **asked)], speculation=speculation)
    assert found == plain
    assert set(most) <= {1, len(prompt)}
    assert len(most) < len(most_plain)
