"""Log-probabilities through the engine, next to transformers: cached, chunked, batched, preempted and ahead or not."""

import numpy as np
import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.logprobs import joined
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

CLOSE = 2e-4
PROMPTS = {"long": list(range(20, 61)), "short": [5], "same": list(range(20, 57)), "other": list(range(100, 113))}
ASKED = {"logprobs": 3, "prompt_logprobs": 2}

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "MistralForCausalLM")


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def make_client(checkpoint, *, platform=None, depth=None, **settings):
    given = {"max_model_len": 96, "num_gpu_blocks_override": 40, "max_num_seqs": 4} | settings
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="float32", **given))
    executor = UniprocExecutor(Worker(config, platform=platform), overlap=platform is not None)
    return Client(EngineCore(config, executor, depth=depth))


@torch.inference_mode()
def check(model, client, prompts=PROMPTS, num_likeliest=3):
    for name, prompt in prompts.items():
        tokens = client.tokens[name]
        expected = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1).numpy()
        found = joined(client.logprobs[name])
        check_rows(found, tokens, expected[len(prompt) - 1 :], num_likeliest)
        if len(prompt) > 1:
            check_rows(client.prompt_logprobs[name], prompt[1:], expected, 2)


def check_rows(found, tokens, expected, num_likeliest):
    assert found.token_ids.shape == (len(tokens), 1 + num_likeliest)
    assert found.token_ids[:, 0].tolist() == list(tokens)
    for row, token in enumerate(tokens):
        np.testing.assert_allclose(found.values[row], expected[row][found.token_ids[row]], atol=CLOSE)
        likeliest = np.sort(expected[row])[::-1][:num_likeliest]
        np.testing.assert_allclose(found.values[row, 1:], likeliest, atol=CLOSE)
        near = np.abs(expected[row] - expected[row][token]) < CLOSE
        above = (expected[row] > expected[row][token]) & ~near
        assert above.sum() < found.ranks[row] <= above.sum() + near.sum()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [8, slow(96)])
@pytest.mark.parametrize("seqs", [4, slow(1)])
def test_cached_or_not_in_chunks_or_whole_alone_or_together(checkpoint, reference, caching, budget, seqs):
    client = make_client(checkpoint, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=seqs)
    for name, prompt in PROMPTS.items():  # one after the other: prefixes of those before are cached
        client.add(core_request(name, prompt, max_tokens=6, temperature=0.8, **ASKED))
        client.step()
    client.run()
    assert set(client.cached.values()) == {0}, "the hidden state of every prompt token is needed"
    check(reference, client)


@pytest.mark.parametrize("mode", ["eager", slow("graphs")])
@pytest.mark.parametrize("budget", [8, 96])
def test_on_a_device_that_works_ahead(checkpoint, reference, mode, budget):
    client = make_client(
        checkpoint,
        platform=QueuedPlatform(),
        max_num_batched_tokens=budget,
        enforce_eager=mode == "eager",
        attention_backend="TORCH_PAGED",
    )
    client.add(
        *(core_request(name, prompt, max_tokens=6, temperature=0.8, **ASKED) for name, prompt in PROMPTS.items())
    )
    client.run()
    check(reference, client)


@pytest.mark.parametrize("platform", [None, QueuedPlatform])
def test_preempted_requests(checkpoint, reference, platform):
    client = make_client(
        checkpoint,
        platform=platform and platform(),
        num_gpu_blocks_override=7,
        max_num_batched_tokens=16,
        max_model_len=80,
        attention_backend="TORCH_PAGED",
    )
    prompts = {name: PROMPTS[name][:30] for name in ("long", "same", "other")}
    client.add(
        *(core_request(name, prompt, max_tokens=24, temperature=0.8, **ASKED) for name, prompt in prompts.items())
    )
    client.run()
    assert client.stats.num_preemptions
    check(reference, client, prompts)


def test_requests_that_ask_for_nothing_are_as_without(checkpoint):
    tokens = []
    for asked in ({}, ASKED):
        client = make_client(checkpoint)
        client.add(core_request("special", PROMPTS["long"], max_tokens=6, **asked))
        client.add(*(core_request(name, prompt, max_tokens=6) for name, prompt in PROMPTS.items()))
        client.run()
        tokens.append(client.tokens)
        assert set(client.logprobs) == ({"special"} if asked else set())
    assert tokens[0] == tokens[1]


def test_one_that_goes_on_after_a_restart_has_none_of_what_was_told(checkpoint, reference):
    whole, resumed = make_client(checkpoint), make_client(checkpoint)
    whole.add(core_request("a", PROMPTS["long"], max_tokens=8, **ASKED))
    whole.run()
    emitted = whole.tokens["a"][:3]
    resumed.add(core_request("a", PROMPTS["long"], emitted=emitted, max_tokens=8, **ASKED))
    resumed.run()
    assert resumed.tokens["a"] == whole.tokens["a"][3:]
    assert not resumed.prompt_logprobs
    found, expected = joined(resumed.logprobs["a"]), joined(whole.logprobs["a"])
    assert found.token_ids.tolist() == expected.token_ids[3:].tolist()
    np.testing.assert_allclose(found.values, expected.values[3:], atol=CLOSE)


def test_no_token_at_all(checkpoint, reference):
    client = make_client(checkpoint, max_num_batched_tokens=16)
    client.add(core_request("a", PROMPTS["long"], max_tokens=0, **ASKED), core_request("b", [5], max_tokens=0))
    client.run()
    assert {name: finish.reason.value for name, finish in client.finish.items()} == {"a": "length", "b": "length"}
    assert client.tokens == {"a": [], "b": []}
    assert not client.logprobs
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS["long"]])).logits[0].log_softmax(-1).numpy()
    check_rows(client.prompt_logprobs["a"], PROMPTS["long"][1:], expected, 2)
