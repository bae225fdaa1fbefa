"""Figures about the engine that travel with its outputs."""

import msgspec


class ResidencySamples(msgspec.Struct, array_like=True):
    """How long some of the KV blocks stayed, in seconds; since the last report."""

    lifetimes_s: list[float] = []
    """Allocation to eviction."""
    idle_s: list[float] = []
    """Last use to eviction, of the same blocks."""
    reuse_gaps_s: list[float] = []
    """Between a use and the next one."""


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """What became of drafts; totals since the start of the engine."""

    num_drafts: int = 0
    """Times that a request had drafts verified."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_per_pos: tuple[int, ...] = ()
    """Drafts that were accepted, by their place among those of one request in one step."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(self.num_accepted_per_pos)


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
    residency: ResidencySamples | None = None
    """Only where blocks are sampled (--kv-cache-metrics), and something was."""
    drafts: DraftCounts | None = None
    """Only where drafts are proposed (--speculative-config)."""
