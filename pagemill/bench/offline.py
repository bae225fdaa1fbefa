"""Offline measurements through `LLM`: output tokens per second of many requests, and the time one batch takes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagemill.bench.summary import Summary, summarize
from pagemill.bench.workload import WorkItem
from pagemill.errors import ConfigError
from pagemill.messages.outputs import RequestOutput
from pagemill.messages.sampling_params import SamplingParams

GREEDY: Mapping[str, Any] = {"temperature": 0.0}


class Generator(Protocol):
    """What this needs of LLM."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        """All outputs, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of one run over a workload."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one batch that was run again and again."""

    batch_size: int
    num_iterations: int
    latency: Summary


def measure_throughput(
    llm: Generator, workload: Sequence[WorkItem], sampling: Mapping[str, Any] = GREEDY
) -> Throughput:
    """Run the whole workload at once, past end-of-sequence: every request generates all it was asked for. `sampling`
    are SamplingParams by name."""
    outputs, duration_s = run_timed(llm, workload, sampling)
    num_prompt_tokens = sum(len(item.prompt_token_ids) for item in workload)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Throughput(
        num_requests=len(workload),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        duration_s=duration_s,
        requests_per_s=len(workload) / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
    )


def measure_latency(
    llm: Generator,
    batches: Sequence[Sequence[WorkItem]],
    num_warmups: int,
    sampling: Mapping[str, Any] = GREEDY,
) -> Latency:
    """Run the batches one after the other; the first `num_warmups` are not counted.

    The batches should differ in their tokens, or all but the first find their prompts in the prefix cache.
    """
    durations_s = [run_timed(llm, batch, sampling)[1] for batch in batches][num_warmups:]
    latency = summarize(durations_s)
    if latency is None:
        raise ConfigError(f"num_iterations={len(batches) - num_warmups} is too small: at least 1")
    return Latency(len(batches[0]), len(durations_s), latency)


def run_timed(
    llm: Generator, workload: Sequence[WorkItem], sampling: Mapping[str, Any] = GREEDY
) -> tuple[list[RequestOutput], float]:
    """Outputs of the whole workload, run at once, and the seconds it took."""
    prompts = [{"prompt_token_ids": item.prompt_token_ids} for item in workload]
    params = [
        SamplingParams(**sampling, ignore_eos=True, max_tokens=item.num_output_tokens, detokenize=False)
        for item in workload
    ]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, time.perf_counter() - start_s
