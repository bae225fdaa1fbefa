"""Rules of the scheduler: how many tokens a step has, and whether steps overlap."""

from dataclasses import replace

from pagemill.catalog.executors import UNI
from pagemill.config.decisions import Decisions, completed
from pagemill.config.facts import DeviceFacts
from pagemill.config.sections import CpuConfig, ModelConfig, ParallelConfig, SchedulerConfig, SchedulerSettings
from pagemill.errors import ConfigError


def resolve_scheduler(
    asked: SchedulerSettings,
    model: ModelConfig,
    parallel: ParallelConfig,
    cpu: CpuConfig,
    device: DeviceFacts,
    decisions: Decisions,
    *,
    whole_prompts: bool = False,
) -> SchedulerConfig:
    """The section, complete. `whole_prompts`: whether a prompt must be computed in one step. Raises ConfigError."""
    if whole_prompts and asked.long_prefill_token_threshold:
        raise ConfigError(
            f"long_prefill_token_threshold={asked.long_prefill_token_threshold} splits prompts, and an encoder "
            "computes each in one step; leave it out"
        )
    chunks = asked.enable_chunked_prefill and not whole_prompts
    num_seqs = asked.max_num_seqs
    if num_seqs is None:
        num_seqs = decisions.note("max_num_seqs", device.num_seqs, "default")
    return completed(
        SchedulerConfig,
        replace(asked, enable_chunked_prefill=chunks),
        max_num_batched_tokens=_token_budget(asked, num_seqs, chunks, model.max_model_len, device, decisions),
        max_num_seqs=num_seqs,
        max_prefill_tokens=_prefill_tokens(asked.max_prefill_tokens, cpu.cpu_threads, device, decisions, whole_prompts),
        async_scheduling=_async_scheduling(asked.async_scheduling, parallel, device, decisions),
    )


def _token_budget(
    asked: SchedulerSettings, num_seqs: int, chunks: bool, length: int, device: DeviceFacts, decisions: Decisions
) -> int:
    budget = asked.max_num_batched_tokens
    if budget is None:
        whole = 0 if chunks else length
        budget = max(device.token_budget, num_seqs, whole)
        decisions.note("max_num_batched_tokens", budget, "default")
    if not chunks and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length} and chunked prefill is off; "
            "raise the former, lower the latter, or leave out --no-enable-chunked-prefill"
        )
    return budget


def _prefill_tokens(
    asked: int | None, num_threads: int, device: DeviceFacts, decisions: Decisions, whole_prompts: bool
) -> int:
    if asked is not None:
        return asked
    if whole_prompts:
        return decisions.note("max_prefill_tokens", 0, "no request waits for the next of its tokens")
    most = device.prefill_tokens * num_threads
    return decisions.note("max_prefill_tokens", most, f"{device.prefill_tokens} for each thread" if most else "default")


def _async_scheduling(asked: bool | None, parallel: ParallelConfig, device: DeviceFacts, decisions: Decisions) -> bool:
    if asked is not None:
        return asked
    if device.runs_ahead:
        return decisions.note("async_scheduling", True, f"a {device.kind} device takes work ahead")
    apart = parallel.distributed_executor_backend != UNI
    return decisions.note("async_scheduling", apart, "workers run apart" if apart else "one process")
