import time
from typing import Any

import pytest

from pagemill.bench.offline import measure_latency, measure_throughput
from pagemill.bench.workload import WorkItem
from pagemill.errors import ConfigError
from pagemill.messages.outputs import CompletionOutput, RequestOutput

WORK = [WorkItem([1, 2, 3], 4), WorkItem([5], 2)]


class FakeLLM:
    """Takes `delays_s` per call and returns as many tokens as were asked for."""

    def __init__(self, *delays_s: float) -> None:
        self.delays_s = list(delays_s)
        self.calls: list[tuple[Any, Any]] = []

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append((prompts, sampling_params))
        time.sleep(self.delays_s.pop(0))
        return [
            RequestOutput(
                "r", None, prompt["prompt_token_ids"], [CompletionOutput(0, "", [7] * params.max_tokens)], True
            )
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]


def test_throughput():
    llm = FakeLLM(0.05)
    result = measure_throughput(llm, WORK)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (2, 4, 6)
    assert 0.05 <= result.duration_s < 60
    assert result.output_tokens_per_s == pytest.approx(6 / result.duration_s)
    assert result.total_tokens_per_s == pytest.approx(10 / result.duration_s)
    assert result.requests_per_s == pytest.approx(2 / result.duration_s)
    prompts, params = llm.calls[0]
    assert prompts == [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [5]}]
    assert all(each.greedy and each.ignore_eos and not each.detokenize for each in params)


@pytest.mark.slow
def test_latency_leaves_the_warm_up_out():
    result = measure_latency(FakeLLM(0.2, 0.01, 0.02), [WORK, WORK, WORK], num_warmups=1)
    assert (result.batch_size, result.num_iterations) == (2, 2)
    assert 10.0 <= result.latency.median_ms < 100.0


def test_latency_needs_an_iteration():
    with pytest.raises(ConfigError, match="num_iterations=0 is too small"):
        measure_latency(FakeLLM(0.0), [WORK], num_warmups=1)
