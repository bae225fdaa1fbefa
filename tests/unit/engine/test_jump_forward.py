"""Tokens that a grammar forces, through the engine: where there is one way to write a text, the output is the one that
is sampled token by token, in fewer steps."""

from functools import cache

import numpy as np
import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.interface import num_words
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import TokenTable
from pagemill.launch import build_config
from pagemill.messages.logprobs import joined
from pagemill.messages.structured_outputs import FreeTokens, StructuredOutputsParams
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import VOCAB_SIZE, make_checkpoint
from tests.marks import slow

CLOSE = 2e-4
END = 256
BYTES = TokenTable([bytes([byte]) for byte in range(256)] + [b"<end>"] + [b""] * (VOCAB_SIZE - 257), [END], [END])
"""Each text is written in one way."""
ANIMAL = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["first", "second"]},
        "done": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "mark": {"const": "forced"},
    },
    "required": ["kind", "done", "count", "mark"],
    "additionalProperties": False,
}
PROMPTS = {"short": [5], "long": list(range(20, 61)), "other": list(range(100, 113))}
ASKED = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.5},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 0.5},
    "bias": {"logit_bias": {ord("1"): 5.0, ord("t"): -5.0}},
    "cut off in a stretch": {"max_tokens": 5},
    "cut off behind a stretch": {"max_tokens": 9},
    "stopped in a stretch": {"stop_token_ids": [ord(",")], "min_tokens": 3},
    "stopped where it first may be": {"stop_token_ids": [ord(":")], "min_tokens": 7},
    "log-probabilities": {"logprobs": 2, "temperature": 0.7},
    "of the prompt, too": {"logprobs": 0, "prompt_logprobs": 1},
    "of named tokens": {"logprob_token_ids": [ord("{"), ord("}"), 7], "max_tokens": 33},
}

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.cases(one_in=15)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def matcher():
    source = translated(StructuredOutputsParams(json=ANIMAL, disable_any_whitespace=True))
    return GuidanceBackend(BYTES).matcher(source)


def make_client(checkpoint, matcher, *, jump=True, free=None, platform=None, depth=None, **settings):
    given = {"max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_seqs": 4} | settings
    args = EngineArgs(str(checkpoint), device="cpu", dtype="float32", enable_jump_forward=jump, **given)
    config = build_config(args)

    def grammar_of(request):
        grammar = FollowedGrammar(matcher.copy(), num_words(VOCAB_SIZE), BYTES.ends, free)
        grammar.accept(request.emitted_token_ids)
        return grammar

    executor = UniprocExecutor(Worker(config, platform=platform), overlap=platform is not None)
    return Client(EngineCore(config, executor, depth=depth, grammar_of=grammar_of))


def run(client, asked, prompts=PROMPTS, **more):
    for name, prompt in prompts.items():
        client.add(core_request(name, prompt, **({"max_tokens": 80, "seed": sum(prompt)} | asked | more)))
    client.run()
    return client


@pytest.fixture(scope="module")
def without(checkpoint, matcher):
    """`without(asked, *names)`: what is sampled token by token, of all prompts or of some. Computed once."""

    @cache
    def computed(asked, *names):
        prompts = {name: PROMPTS[name] for name in names or PROMPTS}
        return run(make_client(checkpoint, matcher, jump=False), ASKED[asked], prompts)

    return computed


def check_same(found, expected):
    assert found.tokens == expected.tokens
    assert found.finish == expected.finish
    assert found.logprobs.keys() == expected.logprobs.keys()
    for name, parts in expected.logprobs.items():
        one, other = joined(found.logprobs[name]), joined(parts)
        assert len(one) == len(found.tokens[name])
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.values, other.values, atol=CLOSE)
        assert one.ranks.tolist() == other.ranks.tolist()
    assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys()


@pytest.mark.cases(one_in=2 * len(ASKED))
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("budget", [9, slow(96)])
def test_an_output_is_what_is_sampled_without(checkpoint, matcher, without, asked, budget):
    """Prompts and forced stretches in chunks, too."""
    expected = without(asked)
    found = run(make_client(checkpoint, matcher, max_num_batched_tokens=budget), ASKED[asked])
    check_same(found, expected)
    text = bytes(found.tokens["long"]).decode()
    assert text.startswith('{"kin')
    alone = run(make_client(checkpoint, matcher), ASKED[asked], {"long": PROMPTS["long"]})
    assert alone.tokens["long"] == found.tokens["long"]
    one_by_one = without(asked, "long")
    assert alone.core.num_executed <= 0.8 * one_by_one.core.num_executed


@pytest.mark.parametrize("asked", ["hot", "penalties", "log-probabilities"])
@pytest.mark.parametrize("depth", [2, slow(3)])
def test_steps_ahead(checkpoint, matcher, without, asked, depth):
    expected = without(asked)
    check_same(run(make_client(checkpoint, matcher, depth=depth), ASKED[asked]), expected)


@pytest.mark.parametrize("asked", ["hot", "penalties", "log-probabilities", "of named tokens"])
@pytest.mark.parametrize("mode", ["eager", slow("graphs")])
def test_on_a_device_that_works_ahead(checkpoint, matcher, without, asked, mode):
    expected = without(asked)
    settings = {"enforce_eager": mode == "eager", "attention_backend": "TORCH_PAGED", "max_num_batched_tokens": 16}
    check_same(run(make_client(checkpoint, matcher, platform=QueuedPlatform(), **settings), ASKED[asked]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["hot", "log-probabilities"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests(checkpoint, matcher, asked, depth):
    """Prefixes of those that come again are cached, forced tokens among them."""
    prompts = {name: [number, *range(20, 49)] for number, name in enumerate("abc")}
    without = run(make_client(checkpoint, matcher, jump=False), ASKED[asked], prompts)
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 112}
    found = run(make_client(checkpoint, matcher, depth=depth, **settings), ASKED[asked], prompts)
    assert found.stats.num_preemptions
    check_same(found, without)


@pytest.mark.slow
@torch.inference_mode()
def test_log_probabilities_of_forced_tokens_are_those_of_the_model(checkpoint, matcher):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = run(make_client(checkpoint, matcher, max_num_batched_tokens=9), ASKED["log-probabilities"])
    for name, prompt in PROMPTS.items():
        tokens = found.tokens[name]
        rows = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1).numpy()[len(prompt) - 1 :]
        told = joined(found.logprobs[name])
        assert told.token_ids[:, 0].tolist() == tokens
        for row, token in enumerate(tokens):
            np.testing.assert_allclose(told.values[row], rows[row][told.token_ids[row]], atol=CLOSE)
            np.testing.assert_allclose(told.values[row, 1:], np.sort(rows[row])[::-1][:2], atol=CLOSE)
            assert told.values[row, 0] == pytest.approx(rows[row][token], abs=CLOSE)


@pytest.mark.parametrize("asked", ["hot", "log-probabilities"])
def test_one_that_was_computed_before(checkpoint, matcher, asked):
    """The prefix cache has its forced tokens; what they are scored by is computed all the same."""
    client = run(make_client(checkpoint, matcher), ASKED[asked], {"long": PROMPTS["long"]})
    run(client, ASKED[asked], {"again": PROMPTS["long"]})
    assert client.cached["again"] >= 32
    assert client.tokens["again"] == client.tokens["long"]
    if asked != "hot":
        one, other = (joined(client.logprobs[name]) for name in ("long", "again"))
        np.testing.assert_allclose(one.values, other.values, atol=CLOSE)


@pytest.mark.parametrize("asked", ["hot", "log-probabilities"])
@pytest.mark.parametrize("count", [1, 4, 14])
def test_one_that_goes_on_after_a_restart(checkpoint, matcher, asked, count):
    prompts = {"long": PROMPTS["long"]}
    whole = run(make_client(checkpoint, matcher), ASKED[asked], prompts)
    emitted = whole.tokens["long"][:count]
    resumed = run(make_client(checkpoint, matcher), ASKED[asked], prompts, emitted=emitted)
    assert resumed.tokens["long"] == whole.tokens["long"][count:]
    assert sum(map(len, resumed.logprobs.get("long", []))) in (0, len(resumed.tokens["long"]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_nothing_is_forced_where_what_is_told_depends_on_the_grammar(checkpoint, matcher, mode):
    asked = ASKED["log-probabilities"]
    without = run(make_client(checkpoint, matcher, jump=False, logprobs_mode=mode), asked)
    found = run(make_client(checkpoint, matcher, logprobs_mode=mode), asked)
    check_same(found, without)
    assert found.core.num_executed == without.core.num_executed
    assert run(make_client(checkpoint, matcher, logprobs_mode=mode), {}).core.num_executed < found.core.num_executed


@pytest.mark.slow
def test_nothing_is_forced_where_tokens_are_ruled_out(checkpoint, matcher):
    asked = {"bad_words_token_ids": [[ord("1")], [ord("t"), ord("r")]]}
    without = run(make_client(checkpoint, matcher, jump=False), asked)
    found = run(make_client(checkpoint, matcher), asked)
    check_same(found, without)
    assert found.core.num_executed == without.core.num_executed


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["hot", "log-probabilities"])
@pytest.mark.parametrize("begin", [None, 8])
def test_free_until_an_end_of_reasoning(checkpoint, matcher, asked, begin):
    """What comes before is the model's, and nothing is forced there."""
    settings = {"logit_bias": {9: 8.0, 8: 8.0}, "max_tokens": 100}
    free = FreeTokens((((9,),),), begin)
    found, without, ahead = (
        run(make_client(checkpoint, matcher, free=free, **how), ASKED[asked] | settings)
        for how in ({}, {"jump": False}, {"depth": 2})
    )
    check_same(found, without)
    check_same(ahead, without)
    tokens = found.tokens["short"]
    assert begin is None or tokens[0] == begin
    assert bytes(tokens[tokens.index(9) + 1 :][:7]) == b'{"kind"'
