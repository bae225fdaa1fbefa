"""`resolve(args, model, device) -> EngineConfig`: a list of rules, each of which fills in one kind of default.

A rule takes a draft of the sections and returns a new one with the decisions it made; it never writes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from pagemill.config.compilation import GraphLimits, complete
from pagemill.config.engine_config import EngineConfig
from pagemill.config.event_endpoints import check_endpoints
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.sections import (
    CacheConfig,
    CpuConfig,
    DeviceConfig,
    GraphConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
)
from pagemill.config.thread_lists import AUTO, parse_lists
from pagemill.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Decision:
    """One default that was filled in."""

    field: str
    value: Any
    why: str


@dataclasses.dataclass(frozen=True)
class Draft:
    """Sections on their way to being complete."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    cpu: CpuConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = dataclasses.field(default_factory=ObservabilityConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    graphs: GraphConfig = dataclasses.field(default_factory=GraphConfig)
    decisions: tuple[Decision, ...] = ()

    def decide(self, section: str, field: str, value: Any, why: str) -> "Draft":
        """A draft in which the field has the value, and the reason is recorded."""
        changed = dataclasses.replace(getattr(self, section), **{field: value})
        decision = Decision(field, value, why)
        return dataclasses.replace(self, **{section: changed, "decisions": (*self.decisions, decision)})


Rule = Callable[[Draft, ModelFacts, DeviceFacts], Draft]


def _dtype(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.model.dtype != "auto":
        return draft
    quantization = draft.model.quantization
    in_gguf = quantization is None and model.weights_format == "gguf" and model.dtype == "bfloat16"
    in_file = in_gguf or (model.quant_method is not None and quantization in (None, model.quant_method))
    if device.quantized_dtype and (in_file or quantization == "int8"):
        return draft.decide("model", "dtype", device.quantized_dtype, "beside quantized weights")
    if model.dtype in device.fast_dtypes:
        return draft.decide("model", "dtype", model.dtype, "as in the checkpoint")
    return draft.decide("model", "dtype", device.fast_dtypes[0], f"{model.dtype} is slow on this {device.kind}")


def _max_model_len(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    wanted = draft.model.max_model_len
    if not draft.model.pools and (wanted or model.max_position) < 2:
        raise ConfigError(f"max_model_len={wanted or model.max_position} is not allowed: text needs room for 2 tokens, "
                          "one of the prompt and one of the output; use --max-model-len 2 or more")  # fmt: skip
    if wanted is None:
        return draft.decide("model", "max_model_len", model.max_position, "the model's")
    if wanted > model.max_position:
        raise ConfigError(
            f"max_model_len={wanted} is more than the model's {model.max_position} positions; "
            f"use --max-model-len {model.max_position} or less"
        )
    return draft


def _block_size(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.cache.block_size is not None:
        return draft
    return draft.decide("cache", "block_size", DEFAULT_BLOCK_SIZE, "default")


def _kv_events(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    events = draft.cache.kv_events_config
    if not events.active:
        return draft
    if not draft.cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config: there are no events with enable_prefix_caching=False; leave out "
            "--no-enable-prefix-caching, or set enable_kv_cache_events to false"
        )
    check_endpoints(events, 1)
    return draft


def _attention(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    given = draft.model.attention_config
    if draft.model.attention_backend is not None and given.backend is not None:
        raise ConfigError(
            f"attention_backend={draft.model.attention_backend!r} and attention_config.backend={given.backend!r} are "
            "mutually exclusive; use one of them"
        )
    if given.flash_attn_version not in (None, 2, 3):
        raise ConfigError(f"attention_config.flash_attn_version={given.flash_attn_version} is not allowed: 2 or 3")
    return draft


def _token_budget(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    limits, length = draft.scheduler, draft.model.max_model_len or 0
    budget = limits.max_num_batched_tokens
    if budget is None:
        whole = length if not limits.enable_chunked_prefill else 0
        budget = max(device.token_budget, limits.max_num_seqs, whole)
        draft = draft.decide("scheduler", "max_num_batched_tokens", budget, "default")
    if not limits.enable_chunked_prefill and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length} and chunked prefill is off; "
            "raise the former, lower the latter, or leave out --no-enable-chunked-prefill"
        )
    return draft


def _threads(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.cpu.cpu_threads_bind is None:
        draft = draft.decide("cpu", "cpu_threads_bind", AUTO, "default")
    parse_lists(draft.cpu.cpu_threads_bind or AUTO)
    if draft.cpu.cpu_threads is not None:
        return draft
    workers = draft.parallel.workers_per_replica
    why = "physical cores" if workers == 1 else f"{device.num_cores} physical cores for {workers} workers"
    return draft.decide("cpu", "cpu_threads", max(1, device.num_cores // workers), why)


def _prefill_tokens(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.scheduler.max_prefill_tokens is not None:
        return draft
    most = device.prefill_tokens * (draft.cpu.cpu_threads or 1)
    why = f"{device.prefill_tokens} for each thread" if most else "default"
    return draft.decide("scheduler", "max_prefill_tokens", most, why)


def _partial_block_reuse(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.cache.enable_partial_block_reuse and not draft.cache.enable_prefix_caching:
        raise ConfigError(
            "enable_partial_block_reuse=True needs enable_prefix_caching=True; leave out --no-enable-prefix-caching, "
            "or --enable-partial-block-reuse"
        )
    return draft


def _parallel(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    sizes = draft.parallel
    if sizes.enable_expert_parallel and not model.num_experts:
        raise ConfigError(
            f"enable_expert_parallel=True needs a mixture of experts, and {model.name} has no experts; leave it out"
        )
    if sizes.tensor_parallel_size > 1 and not splits_over(model, sizes.tensor_parallel_size):
        heads, kv_heads, inner = _split_sizes(model)
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if splits_over(model, size))
        raise ConfigError(
            f"tensor_parallel_size={sizes.tensor_parallel_size} does not fit num_attention_heads={heads}, "
            f"num_key_value_heads={kv_heads} and intermediate_size={inner} of {model.name}; allowed: {allowed}"
        )
    num_layers = int(model.hf_config.get("num_hidden_layers", 1))
    if sizes.pipeline_parallel_size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={sizes.pipeline_parallel_size} is more than the {num_layers} layers of "
            f"{model.name}; allowed: 1 to {num_layers}"
        )
    return draft


def _executor(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    wanted, workers = draft.parallel.distributed_executor_backend, draft.parallel.workers_per_replica
    if wanted is None:
        name = "uni" if workers == 1 else "mp"
        return draft.decide("parallel", "distributed_executor_backend", name, f"{workers} workers")
    if wanted == "uni" and workers > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' runs one worker, and tensor_parallel_size x pipeline_parallel_size "
            f"is {workers}; use --distributed-executor-backend mp"
        )
    return draft


def _async_scheduling(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.scheduler.async_scheduling is not None:
        return draft
    if device.runs_ahead:
        return draft.decide("scheduler", "async_scheduling", True, f"a {device.kind} device takes work ahead")
    apart = draft.parallel.distributed_executor_backend != "uni"
    return draft.decide("scheduler", "async_scheduling", apart, "workers run apart" if apart else "one process")


def _device(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    share = draft.cache.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization={share} is not allowed: above 0 and up to 1")
    if draft.device.device != "auto":
        return draft
    return draft.decide("device", "device", device.kind, "the machine's")


def _kv_cache_metrics(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.cache.kv_cache_metrics and draft.observability.disable_log_stats:
        raise ConfigError(
            "kv_cache_metrics=True needs statistics, and disable_log_stats=True keeps none; leave out "
            "--disable-log-stats (LLM: disable_log_stats=False)"
        )
    share = draft.cache.kv_cache_metrics_sample
    if not 0 < share <= 1:
        raise ConfigError(f"kv_cache_metrics_sample={share} is not allowed: above 0 and up to 1")
    return draft


def _graphs(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    limits, given = draft.scheduler, draft.graphs
    budget = limits.max_num_batched_tokens or limits.max_num_seqs
    completed = complete(given, GraphLimits(limits.max_num_seqs, budget, device.kind, device.captures))
    if not device.captures:
        why = f"there are no graphs on a {device.kind}"
    else:
        why = "enforce_eager" if given.enforce_eager else f"optimization level {given.optimization_level}"
    return draft.decide("graphs", "compilation_config", completed, why)


def _runner(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    wanted = draft.model.runner
    if wanted == "generate" and not model.has_head:
        raise ConfigError(
            f"runner='generate' needs an output head, and {model.name} has none: it is for embeddings only; "
            "use --runner pooling"
        )
    if wanted != "auto":
        return draft
    if model.has_head and model.pooling_type is None:
        return draft.decide("model", "runner", "generate", "default")
    return draft.decide("model", "runner", "pooling", "the model is for embeddings")


def _pooler(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    given = draft.model.pooler_config
    if not draft.model.pools:
        if given != PoolerConfig():
            raise ConfigError("pooler_config has no effect on a model that generates text; use --runner pooling")
        return draft
    completed = PoolerConfig(
        pooling_type=given.pooling_type or model.pooling_type or "LAST",
        normalize=model.normalizes if given.normalize is None else given.normalize,
    )
    return draft.decide("model", "pooler_config", completed, "what is not given is the model's")


def splits_over(model: ModelFacts, tensor_parallel_size: int) -> bool:
    """Whether every rank can have equally many heads and rows; fewer key and value heads than ranks are replicated."""
    heads, kv_heads, inner = _split_sizes(model)
    kv_fits = kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % kv_heads == 0
    return heads % tensor_parallel_size == 0 and kv_fits and inner % tensor_parallel_size == 0


def _split_sizes(model: ModelFacts) -> tuple[int, int, int]:
    config = model.hf_config
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads), int(config["intermediate_size"])


RULES: tuple[Rule, ...] = (
    _device,
    _runner,
    _pooler,
    _dtype,
    _max_model_len,
    _block_size,
    _kv_events,
    _partial_block_reuse,
    _attention,
    _token_budget,
    _parallel,
    _threads,
    _prefill_tokens,
    _executor,
    _async_scheduling,
    _kv_cache_metrics,
    _graphs,
)


def resolve(draft: Draft, model: ModelFacts, device: DeviceFacts) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Complete the sections. Raises ConfigError that names the settings in conflict and the remedy."""
    for section in (
        draft.model,
        draft.cache,
        draft.scheduler,
        draft.cpu,
        draft.parallel,
        draft.observability,
        draft.device,
    ):
        check_values(section)
    check_values(draft.graphs)
    for rule in RULES:
        draft = rule(draft, model, device)
    config = EngineConfig(
        draft.model, draft.cache, draft.scheduler, draft.cpu, model, draft.parallel, draft.observability, draft.device
    )
    config = dataclasses.replace(config, graphs=draft.graphs)
    return config, draft.decisions


def check_values(section: Any) -> None:
    """Check each field of a section, and of settings inside it, against its own choices and lower bound; numbers are
    finite, as no bound stops what is not a number. Raises ConfigError."""
    for field in dataclasses.fields(section):
        value, meta = getattr(section, field.name), field.metadata
        if meta["choices"] and value is not None and value not in meta["choices"]:
            raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(meta['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field.name}={value!r} is not a finite number")
        if meta["low"] is not None and value is not None and value < meta["low"]:
            raise ConfigError(f"{field.name}={value!r} is too small: at least {meta['low']}")
        if dataclasses.is_dataclass(value):
            check_values(value)
