"""Steps that yield several tokens of a slot, from the worker through the engine to the text that a caller gets."""

import itertools
from typing import Any

import pytest

from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.outputs import RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.serve.client.in_flight import InFlight, InFlightRequests
from tests.fakes.engine import make_engine
from tests.fakes.engine_setup import core_request, engine_config
from tests.fakes.scripted_grammar import at_positions, grammar_of
from tests.fakes.scripted_worker import ScriptedWorker, alone

PROMPT = list(range(1, 12))
LENGTH, ASCII = 256, 100
FORCED = at_positions({2: [65, 66, 67], 9: [70] * 4, 20: list(range(97, 110))})
RULES = pytest.mark.parametrize("rule", [None, FORCED], ids=["free", "forced"])


def make_core(rule: Any, depth: int = 1) -> tuple[EngineCore, ScriptedWorker]:
    worker = ScriptedWorker(vocab_size=ASCII, max_drafts=4)
    given = {} if rule is None else {"grammar_of": grammar_of(rule)}
    config = engine_config(max_model_len=LENGTH, budget=256, num_blocks=256)
    return EngineCore(config, UniprocExecutor(worker), depth=depth, **given), worker


def expected(rule: Any, worker: ScriptedWorker, **params: Any) -> list[int]:
    return alone(core_request("a", PROMPT, **params), worker.group_specs, ASCII, LENGTH, rule)


async def outputs_of(core: EngineCore, **params: Any) -> list[RequestOutput]:
    engine = make_engine(core)
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
    found = [output async for output in engine.generate({"prompt_token_ids": PROMPT}, sampling)]
    await engine.shutdown()
    return found


@RULES
@pytest.mark.parametrize("depth", [1, 2])
async def test_text_is_that_of_single_tokens(rule: Any, depth: int) -> None:
    core, worker = make_core(rule, depth)
    outputs = await outputs_of(core, max_tokens=60, seed=5)
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert tokens == expected(rule, worker, max_tokens=60, seed=5)
    assert "".join(output.outputs[0].text for output in outputs) == bytes(tokens).decode()
    assert any(len(output.outputs[0].token_ids) > 1 for output in outputs)


@RULES
async def test_a_stop_string_ends_the_text_within_the_tokens_of_a_step(rule: Any) -> None:
    core, worker = make_core(rule)
    text = bytes(expected(rule, worker, max_tokens=60, seed=5)).decode()
    seen = set()
    for place in range(3, 25):
        stop = text[place : place + 2]
        if text.index(stop) != place:
            continue
        core, _ = make_core(rule)
        outputs = await outputs_of(core, max_tokens=60, seed=5, stop=[stop])
        assert "".join(output.outputs[0].text for output in outputs) == text[:place]
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)
        seen.add(len(outputs[-1].outputs[0].token_ids))
    assert len(seen) > 1, "stop strings end in several places of a step's tokens"


@RULES
@pytest.mark.parametrize("depth", [1, 2])
def test_another_engine_goes_on_where_the_first_was(rule: Any, depth: int) -> None:
    """What a front end remembers of several tokens at once is what the next engine needs."""
    request = core_request("a", PROMPT, max_tokens=50, seed=7)
    for num_steps in (1, 2, 5, 9):
        requests = InFlightRequests()
        entry: InFlight = requests.add(request)
        first, worker = make_core(rule, depth)
        first.add(request)
        for outputs in itertools.chain.from_iterable(first.step() for _ in range(num_steps)):
            requests.note(outputs)
        second, _ = make_core(rule, depth)
        second.add(entry.resumed())
        while second.has_work():
            for outputs in second.step():
                requests.note(outputs)
        assert entry.emitted == expected(rule, worker, max_tokens=50, seed=7)
