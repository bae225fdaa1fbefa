"""Drafts change no token, whatever else a request asks for: filters, forms, log-probabilities; and they are counted."""

import numpy as np
import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.messages.logprobs import joined
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.masked_worker import forms, wide_table
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS, toy_proposer
from tests.marks import slow

PROMPTS = {"a": [5], "b": list(range(20, 61)), "c": [9, 8, 7] * 5, "d": [9, 8, 7] * 5 + [4]}
SETTINGS = {
    "device": "cpu", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 40,
}  # fmt: skip
FORMS = {
    "digits": {"regex": "[0-9]{25}"},
    "object": {
        "json": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer"}},
                 "required": ["kind", "n"], "additionalProperties": False},
        "disable_any_whitespace": True,
    },
    "words": {"regex": "(ab|cd|e){9}"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def toy():
    with toy_proposer():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def checkpoint(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("tiny"), name)
        return str(made[name])

    return checkpoint


class Run:
    """An engine, what it said, and how many steps it took. `rounds`: how often the same is asked, one after the
    other."""

    def __init__(self, checkpoint, asked, speculation=None, depth=1, rounds=1, grammar_of=None, **settings):
        config = build_config(EngineArgs(checkpoint, **(SETTINGS | settings)))
        executor = UniprocExecutor(Worker(config, speculation=speculation))
        given = {} if grammar_of is None else {"grammar_of": grammar_of}
        core = EngineCore(config, executor, depth=depth, **given)
        self.client = Client(core)
        self.num_steps = 0
        for number in range(rounds):
            for name, (prompt, params) in asked.items():
                self.client.add(core_request(name if not number else f"{name} {number}", prompt, **params))
            while core.has_work():
                self.client.step()
                self.num_steps += 1
        core.check_integrity()
        self.stats = core.stats()
        core.shutdown()
        self.tokens = self.client.tokens


def compare(checkpoint, asked, max_drafts=4, **options):
    """The same with drafts that are mostly right; both runs."""
    plain = Run(checkpoint, asked, **options)
    TEXTS[:] = [[*_ids(prompt), *plain.tokens[name]] for name, (prompt, _) in asked.items()]
    drafted = Run(checkpoint, asked, Speculation("toy", max_drafts, adaptive=False), **options)
    assert drafted.tokens == plain.tokens
    assert drafted.client.finish == plain.client.finish
    return plain, drafted


def _ids(prompt):
    return list(core_request("ids", prompt).prompt_token_ids)


def each(**params):
    return {name: (prompt, {"max_tokens": 24, **params}) for name, prompt in PROMPTS.items()}


@pytest.mark.slow
def test_of_filters(checkpoints):
    params = {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 3}
    plain, drafted = compare(checkpoints("LlamaForCausalLM"), each(**params))
    assert drafted.num_steps < plain.num_steps


def test_what_became_of_drafts_is_counted(checkpoints):
    plain, drafted = compare(checkpoints("LlamaForCausalLM"), each(temperature=0.0))
    assert plain.stats.drafts is None
    counts = drafted.stats.drafts
    num_tokens = sum(map(len, plain.tokens.values()))
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert counts.num_accepted_tokens < num_tokens
    assert list(counts.num_accepted_per_pos) == sorted(counts.num_accepted_per_pos, reverse=True)
    assert len(counts.num_accepted_per_pos) == 4


@pytest.mark.slow
def test_steps_of_many_requests_may_have_none(checkpoints):
    asked = each(temperature=0.0)
    plain = Run(checkpoints("LlamaForCausalLM"), asked)
    TEXTS[:] = [[*_ids(prompt), *plain.tokens[name]] for name, (prompt, _) in asked.items()]
    never = Run(checkpoints("LlamaForCausalLM"), asked, Speculation("toy", 4, adaptive=False, disable_by_batch_size=1))
    assert never.tokens == plain.tokens
    assert never.num_steps == plain.num_steps
    assert never.stats.drafts is None
    alone = Run(checkpoints("LlamaForCausalLM"), asked, Speculation("toy", 4, adaptive=False, disable_by_batch_size=2))
    assert alone.tokens == plain.tokens
    assert plain.num_steps > alone.num_steps, "the last request runs alone for a while"


@pytest.mark.slow
def test_every_token_has_its_own_log_probabilities(checkpoints):
    asked = each(temperature=0.8, seed=4, logprobs=2, prompt_logprobs=1)
    plain, drafted = compare(checkpoints("LlamaForCausalLM"), asked)
    for name in asked:
        found, expected = (joined(run.client.logprobs[name]) for run in (drafted, plain))
        assert found.token_ids[:, 0].tolist() == plain.tokens[name]
        assert np.abs(found.values - expected.values).max() < 1e-3


@pytest.fixture(scope="module")
def grammar_of():
    return forms({name: StructuredOutputsParams(**form) for name, form in FORMS.items()}, wide_table())


@pytest.mark.parametrize("jump", [True, slow(False)])
@pytest.mark.parametrize("depth", [1, slow(2)])
def test_of_forms(checkpoints, grammar_of, jump, depth):
    params = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.2, "repetition_penalty": 1.3},
        {"temperature": 0.9, "logprobs": 1},
    ]  # fmt: skip
    names = [*FORMS, "free"]
    asked = {
        name: ([4 + 9 * seed], {"seed": seed, "max_tokens": 40, **given})
        for seed, (name, given) in enumerate(zip(names, params, strict=True))
    }
    options = {"enable_jump_forward": jump, "depth": depth, "grammar_of": grammar_of, "max_model_len": 128}
    plain, drafted = compare(checkpoints("LlamaForCausalLM"), asked, **options)
    if depth == 1:
        assert drafted.num_steps < plain.num_steps
        only = {name: given for name, given in asked.items() if name == "digits"}
        alone = Run(checkpoints("LlamaForCausalLM"), only, Speculation("toy", 4, adaptive=False), **options)
        assert alone.tokens == {"digits": plain.tokens["digits"]}
        assert alone.stats.drafts.num_accepted_tokens > 5, "drafts of a form are verified"
