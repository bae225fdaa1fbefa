"""Two engines in processes of their own that share the experts of a model: answers of one engine alone, and deaths."""

import os
import signal

import pytest

from pagemill import LLM, SamplingParams
from pagemill.config.arguments import EngineArgs
from pagemill.config.fleet_plan import FleetPlan
from pagemill.fleet.engines import EngineFleet, FleetSpec
from pagemill.launch import WORKER, build_config
from tests.fakes.scripted_fleet import FrontEnd
from tests.fakes.tiny_checkpoint import make_checkpoint

SETTINGS = {"dtype": "float32", "max_model_len": 200, "num_gpu_blocks_override": 64, "cpu_threads": 1}
PROMPTS = {"0-first": [5, 80, 9], "1-second": [17] * 30, "0-third": list(range(40, 60)), "1-fourth": [200]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a model, and what one engine answers to the prompts."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3MoeForCausalLM")
    with LLM(str(folder), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS.values()), params, use_tqdm=False)
    return folder, {name: list(out.outputs[0].token_ids) for name, out in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture
def engines(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    config = build_config(EngineArgs(str(alone[0]), enable_expert_parallel=True, **SETTINGS))
    plan = FleetPlan(2, range(2), shares_experts=True, lockstep=True)
    with EngineFleet(FleetSpec(config, WORKER, plan)) as engines:
        engines.start()
        engines.wait_ready()
        yield engines


async def ask(front_end, *names):
    for name in names:
        await front_end.ask(name, PROMPTS[name], temperature=0.0, max_tokens=60, ignore_eos=True)


async def test_they_answer_as_one_does_also_after_one_has_died(alone, engines):
    _, expected = alone
    async with FrontEnd(engines) as front_end:
        await ask(front_end, "0-first", "1-second")
        await front_end.until(lambda: {"0-first", "1-second"} <= front_end.finish.keys(), "the answers")
        assert front_end.tokens == {name: expected[name] for name in ("0-first", "1-second")}
        before = engines.pids()
        await ask(front_end, "0-third", "1-fourth")
        await front_end.until(lambda: front_end.tokens["1-fourth"], "a token")
        os.kill(before[0], signal.SIGKILL)
        await front_end.until(lambda: {"0-third", "1-fourth"} <= front_end.finish.keys(), "the answers of the next")
        assert front_end.tokens == expected
        assert not set(before) & set(engines.pids()), "both started again"
