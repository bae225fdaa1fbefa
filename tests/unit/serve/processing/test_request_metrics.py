"""What scripted requests leave in the metrics, and how intervals are taken."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from pagemill.errors import EngineDeadError, EngineOverloadedError
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.observability.engine_metrics import EngineMetrics
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.processing.output_processor import OutputProcessor
from pagemill.serve.processing.request_metrics import RequestMetrics
from pagemill.serve.processing.request_stream import OutputQueue, RequestStream
from tests.fakes.engine import make_engine, wait_until
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import BOS, EOS, ByteTokenizer
from tests.fakes.wire_metrics import wire_values

Make = Callable[..., AsyncLLM]
PROMPT = [BOS, *b"abcd"]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    engines = []

    def build(core: FakeCore | None = None, **options: Any) -> AsyncLLM:
        engines.append(make_engine(core, **options))
        return engines[-1]

    yield build
    for engine in engines:
        await engine.shutdown()


def values(llm: AsyncLLM) -> dict[str, float]:
    return wire_values(llm.metrics.text())


async def drain(llm: AsyncLLM, prompt: Any = PROMPT, **params: Any) -> None:
    async for _ in llm.generate(prompt, SamplingParams(**params)):
        pass


async def test_tokens_and_reasons(make: Make) -> None:
    llm = make(FakeCore(say("xyz", EOS)))
    await drain(llm, max_tokens=50)
    await drain(llm, max_tokens=2)
    await drain(llm, max_tokens=50, stop=["y"])
    found = values(llm)
    assert found["vllm:prompt_tokens_total"] == 3 * len(PROMPT)
    assert found["vllm:generation_tokens_total"] == 4 + 2 + 2
    reasons = {
        reason: found[f"vllm:request_success_total{{finished_reason={reason}}}"] for reason in ("stop", "length")
    }
    assert reasons == {"stop": 2, "length": 1}
    assert found["vllm:request_params_max_tokens_sum"] == 102
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 3 * (len(PROMPT) - 2)
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{name}_time_seconds_count"] == 3
    assert found["vllm:iteration_tokens_total_sum"] >= 8
    assert llm.metrics.prefix_hits.rate == pytest.approx(2 / len(PROMPT))
    async with asyncio.timeout(60):  # the core hears only later that the text has ended
        while values(llm)["vllm:num_requests_running"] != 0:
            await asyncio.sleep(0.01)


async def test_several_completions_are_one_request(make: Make) -> None:
    llm = make()
    await drain(llm, n=3, max_tokens=4, temperature=1.0)
    found = values(llm)
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (1, 3)
    assert found["vllm:request_max_num_generation_tokens_count"] == 1
    assert found["vllm:request_max_num_generation_tokens_sum"] == 4
    assert found["vllm:request_generation_tokens_count"] == 3
    assert found["vllm:request_success_total{finished_reason=length}"] == 3


async def test_who_leaves_is_counted_as_abort_and_runs_no_more(make: Make) -> None:
    core = FakeCore(step_s=0.001)
    llm = make(core)
    async with contextlib.aclosing(llm.generate(PROMPT, SamplingParams(max_tokens=200, n=2))) as outputs:
        async for _ in outputs:
            break
    await asyncio.to_thread(wait_until, lambda: len(core.aborted) == 2)
    await asyncio.to_thread(wait_until, lambda: values(llm)["vllm:num_requests_running"] == 0)
    found = values(llm)
    assert found["vllm:request_success_total{finished_reason=abort}"] == 2
    assert found["vllm:request_params_n_count"] == 1


async def test_a_dead_engine_is_an_error_of_what_it_had(make: Make) -> None:
    llm = make(FakeCore(fail_after=2))
    with pytest.raises(EngineDeadError):
        await drain(llm, max_tokens=50)
    assert values(llm)["vllm:request_success_total{finished_reason=error}"] == 1


async def test_refused_requests(make: Make) -> None:
    llm = make(FakeCore(step_s=0.002), max_num_seqs=1, max_num_queued_reqs=1)
    first = llm.generate(PROMPT, SamplingParams(max_tokens=200, n=2))
    await anext(first)
    with pytest.raises(EngineOverloadedError):
        await drain(llm)
    await first.aclose()
    assert values(llm)["vllm:admission_rejections_total{reason=queue_full}"] == 1


async def test_a_line_in_the_log_while_there_is_work(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pagemill"), "propagate", True)
    caplog.set_level(logging.INFO, "pagemill")
    llm = make(FakeCore(step_s=0.002), log_interval_s=0.02)
    await drain(llm, max_tokens=50)
    await asyncio.sleep(0.05)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("running: ")]
    assert lines
    assert lines[0].startswith("running: 1, waiting: 0, KV cache usage: 0.0%, prompt: ")
    assert lines[-1].startswith("running: 0, waiting: 0")
    count = len(lines)
    await asyncio.sleep(0.1)
    assert sum(record.getMessage().startswith("running: ") for record in caplog.records) == count, "nothing to say"


class Scripted:
    """An output processor that is told of engines with clocks of their own."""

    def __init__(self) -> None:
        self.metrics = ServingMetrics("m", 256, {}, dict)
        self.processor = OutputProcessor(lambda token: token == EOS, RequestMetrics(self.metrics))
        params = SamplingParams(max_tokens=10, seed=1, detokenize=False)
        request = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, params=params, arrival_time=0.0)
        self.processor.add(RequestStream("r", None, [request], ByteTokenizer(), OutputQueue()))

    def first(self, at: float, queued: float, scheduled: float, engine: int = 0) -> None:
        output = EngineCoreOutput(
            request_id="r", new_token_ids=[1], num_cached_tokens=0, queued_at=queued, scheduled_at=scheduled
        )
        self.processor.process(EngineCoreOutputs(engine_index=engine, outputs=[output], step_at=at))

    def next(self, at: float, engine: int = 0) -> None:
        self.processor.process(EngineCoreOutputs(engine_index=engine, request_ids=["r"], token_ids=[2], step_at=at))

    def end(self, at: float, engine: int = 0) -> EngineMetrics:
        output = EngineCoreOutput(request_id="r", new_token_ids=[3], finish=Finish(FinishReason.LENGTH))
        self.processor.process(EngineCoreOutputs(engine_index=engine, outputs=[output], step_at=at))
        return self.metrics.of_engine(engine)


def sums(metrics: EngineMetrics) -> dict[str, float]:
    names = ("queue", "prefill", "decode", "inference")
    return {name: getattr(metrics, f"request_{name}_time_seconds").total for name in names}


def test_intervals_are_those_of_the_engines_clock() -> None:
    case = Scripted()
    case.first(at=1006.0, queued=1000.0, scheduled=1002.0)
    case.next(at=1007.0)
    case.next(at=1017.0)  # preempted in between: what it costs is part of the decode interval
    metrics = case.end(at=1018.0)
    assert sums(metrics) == {"queue": 2.0, "prefill": 4.0, "decode": 12.0, "inference": 16.0}
    assert (metrics.inter_token_latency_seconds.count, metrics.inter_token_latency_seconds.total) == (3, 12.0)
    assert metrics.request_time_per_output_token_seconds.total == 4.0


def test_another_engines_clock_is_not_compared() -> None:
    case = Scripted()
    case.first(at=6.0, queued=1.0, scheduled=2.0)
    case.next(at=7.0)
    case.first(at=90_005.0, queued=90_000.0, scheduled=90_001.0, engine=1)
    case.next(at=90_006.0, engine=1)
    second, first = case.end(at=90_007.0, engine=1), case.metrics.of_engine(0)
    assert second.request_queue_time_seconds.count == 0
    assert (first.inter_token_latency_seconds.total, second.inter_token_latency_seconds.total) == (1.0, 2.0)
    assert (first.time_to_first_token_seconds.count, second.time_to_first_token_seconds.count) == (1, 0)
    assert (first.num_generation_tokens, second.num_generation_tokens) == (2, 3)
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (len(PROMPT), 0)
    assert second.num_ended["length"] == 1


def test_times_travel() -> None:
    outputs = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="r", queued_at=1.5)], step_at=2.5, num_step_tokens=7
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=EngineCoreOutputs) == outputs
