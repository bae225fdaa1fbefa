"""`resolve(args, model, device) -> EngineConfig`: a list of rules, each of which fills in one kind of default.

A rule takes a draft of the sections and returns a new one with the decisions it made; it never writes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pagemill.config.engine_config import EngineConfig
from pagemill.config.event_endpoints import publish_endpoint, replay_endpoint
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.sections import CacheConfig, CpuConfig, ModelConfig, SchedulerConfig
from pagemill.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16
DEFAULT_TOKEN_BUDGET = 2048


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
    if model.dtype in device.fast_dtypes:
        return draft.decide("model", "dtype", model.dtype, "as in the checkpoint")
    return draft.decide("model", "dtype", device.fast_dtypes[0], f"{model.dtype} is slow on this {device.kind}")


def _max_model_len(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    wanted = draft.model.max_model_len
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
    publish_endpoint(events, data_parallel_rank=0)
    replay_endpoint(events, data_parallel_rank=0)
    return draft


def _token_budget(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    limits, length = draft.scheduler, draft.model.max_model_len or 0
    budget = limits.max_num_batched_tokens
    if budget is None:
        whole = length if not limits.enable_chunked_prefill else 0
        budget = max(DEFAULT_TOKEN_BUDGET, limits.max_num_seqs, whole)
        draft = draft.decide("scheduler", "max_num_batched_tokens", budget, "default")
    if not limits.enable_chunked_prefill and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={length} and chunked prefill is off; "
            "raise the former, lower the latter, or leave out --no-enable-chunked-prefill"
        )
    return draft


def _threads(draft: Draft, model: ModelFacts, device: DeviceFacts) -> Draft:
    if draft.cpu.cpu_threads is not None:
        return draft
    return draft.decide("cpu", "cpu_threads", device.num_cores, "physical cores")


RULES: tuple[Rule, ...] = (_dtype, _max_model_len, _block_size, _kv_events, _token_budget, _threads)


def resolve(draft: Draft, model: ModelFacts, device: DeviceFacts) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Complete the sections. Raises ConfigError that names the settings in conflict and the remedy."""
    for section in (draft.model, draft.cache, draft.scheduler, draft.cpu):
        check_values(section)
    for rule in RULES:
        draft = rule(draft, model, device)
    config = EngineConfig(draft.model, draft.cache, draft.scheduler, draft.cpu, model)
    return config, draft.decisions


def check_values(section: Any) -> None:
    """Check each field of a section, and of settings inside it, against its own choices and lower bound. Raises
    ConfigError."""
    for field in dataclasses.fields(section):
        value, meta = getattr(section, field.name), field.metadata
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(meta['choices'])}")
        if meta["low"] is not None and value is not None and value < meta["low"]:
            raise ConfigError(f"{field.name}={value!r} is too small: at least {meta['low']}")
        if dataclasses.is_dataclass(value):
            check_values(value)
