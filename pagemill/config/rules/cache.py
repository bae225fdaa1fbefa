"""Rules of the KV cache, of what is measured of it, and of the events about it."""

from dataclasses import replace

from pagemill.config.decisions import Decisions, completed
from pagemill.config.event_endpoints import check_endpoints
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.config.sections import CacheConfig, CacheSettings, ObservabilityConfig
from pagemill.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16


def resolve_cache(
    asked: CacheSettings,
    observability: ObservabilityConfig,
    num_engines: int,
    decisions: Decisions,
    *,
    keeps: bool = True,
) -> CacheConfig:
    """The section, complete. `num_engines`: of the server, which all publish events. `keeps`: whether the model keeps
    anything from one step to the next. Raises ConfigError."""
    if not keeps:
        asked = _of_encoder(asked, decisions)
    _check_shares(asked)
    _check_prefix_caching(asked)
    _check_metrics(asked, observability)
    _check_events(asked.kv_events_config, asked.enable_prefix_caching, num_engines)
    block_size = asked.block_size
    if block_size is None:
        block_size = decisions.note("block_size", DEFAULT_BLOCK_SIZE, "default")
    return completed(CacheConfig, asked, block_size=block_size)


def _of_encoder(asked: CacheSettings, decisions: Decisions) -> CacheSettings:
    """There is nothing to share. Raises ConfigError for what needs a cache."""
    if asked.enable_partial_block_reuse or asked.kv_events_config.active:
        name = "enable_partial_block_reuse" if asked.enable_partial_block_reuse else "kv_events_config"
        raise ConfigError(f"{name} is about the prefix cache, and an encoder has none; leave it out")
    why = "an encoder keeps nothing"
    shares = decisions.note("enable_prefix_caching", False, why)
    if asked.kv_cache_dtype != "auto":
        decisions.note("kv_cache_dtype", "auto", why)
    return replace(asked, enable_prefix_caching=shares, kv_cache_dtype="auto")


def _check_shares(asked: CacheSettings) -> None:
    for name in ("gpu_memory_utilization", "kv_cache_metrics_sample"):
        share = getattr(asked, name)
        if not 0 < share <= 1:
            raise ConfigError(f"{name}={share} is not allowed: above 0 and up to 1")


def _check_prefix_caching(asked: CacheSettings) -> None:
    if asked.enable_partial_block_reuse and not asked.enable_prefix_caching:
        raise ConfigError(
            "enable_partial_block_reuse=True needs enable_prefix_caching=True; leave out --no-enable-prefix-caching, "
            "or --enable-partial-block-reuse"
        )


def _check_metrics(asked: CacheSettings, observability: ObservabilityConfig) -> None:
    if asked.kv_cache_metrics and observability.disable_log_stats:
        raise ConfigError(
            "kv_cache_metrics=True needs statistics, and disable_log_stats=True keeps none; leave out "
            "--disable-log-stats (LLM: disable_log_stats=False)"
        )


def _check_events(events: KVEventsConfig, prefix_caching: bool, num_engines: int) -> None:
    if not events.active:
        return
    if not prefix_caching:
        raise ConfigError(
            "kv_events_config: there are no events with enable_prefix_caching=False; leave out "
            "--no-enable-prefix-caching, or set enable_kv_cache_events to false"
        )
    check_endpoints(events, num_engines)
