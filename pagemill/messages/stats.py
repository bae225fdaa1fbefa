"""Figures about the engine that travel with its outputs."""

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, kw_only=True):
    """State after one step; counters are totals since the start of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Blocks in use / all blocks, 0 to 1."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
