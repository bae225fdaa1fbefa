"""What a GPU did over a stretch of time, from a profiler's trace: busy share, gaps, and the kernels that took longest.
Knows nothing about who launched the work."""

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of the events that occupy the GPU, in a Chrome trace of torch.profiler."""
COUNTED_GAP_US = 5.0
"""Gaps from this length on are counted one by one: shorter ones are what lies between two kernels of a graph."""
NAME_CHARS = 72


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on the GPU, in microseconds of one clock."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class KernelShare:
    """All launches of one kernel."""

    name: str
    count: int
    total_ms: float
    share: float
    """Of the stretch; with several streams the shares may add up to more than the busy share."""


@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """A stretch of time."""

    duration_ms: float
    busy_share: float
    """Share of the time in which at least one span ran."""
    num_spans: int
    num_gaps: int
    """Of COUNTED_GAP_US and longer."""
    gaps_ms: float
    """Their sum."""
    longest_gap_ms: float
    kernels: tuple[KernelShare, ...]
    """Longest total first."""


def read_trace(path: Path) -> list[Span]:
    """The GPU's spans of a Chrome trace, plain or .gz, by start. Raises ConfigError when the file is none."""
    try:
        raw = path.read_bytes()
        events: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
        spans = [
            Span(str(event["name"]), float(event["ts"]), float(event.get("dur", 0.0)))
            for event in events
            if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no Chrome trace: {error}") from None
    return sorted(spans, key=lambda span: span.start_us)


def summarize_gpu(
    spans: Sequence[Span], window: tuple[float, float] = (0.0, 1.0), max_kernels: int = 12
) -> GpuTimeline | None:
    """Figures of the part of `spans` (by start) between two shares of their whole time, such as (0.4, 0.95) to leave
    the prompts and the end out. None when there is nothing there."""
    if not spans:
        return None
    first = spans[0].start_us
    last = max(span.end_us for span in spans)
    low, high = (first + share * (last - first) for share in window)
    inside = [span for span in spans if low <= span.start_us and span.end_us <= high]
    if not inside:
        return None
    low = inside[0].start_us
    high = max(span.end_us for span in inside)
    busy_us, gaps_us = _busy_and_gaps(inside)
    duration_us = max(high - low, 1e-9)
    long_gaps = [gap for gap in gaps_us if gap >= COUNTED_GAP_US]
    return GpuTimeline(
        duration_ms=duration_us / 1e3,
        busy_share=busy_us / duration_us,
        num_spans=len(inside),
        num_gaps=len(long_gaps),
        gaps_ms=sum(long_gaps) / 1e3,
        longest_gap_ms=max(gaps_us, default=0.0) / 1e3,
        kernels=_by_kernel(inside, duration_us)[:max_kernels],
    )


def gpu_table(timeline: GpuTimeline) -> str:
    """The figures, then one line per kernel."""
    lines = [
        f"GPU busy {timeline.busy_share:.1%} of {timeline.duration_ms:.1f} ms, {timeline.num_spans} launches; "
        f"{timeline.num_gaps} gaps of {COUNTED_GAP_US:.0f} us or more, {timeline.gaps_ms:.2f} ms together, "
        f"the longest {timeline.longest_gap_ms:.3f} ms"
    ]
    lines += [
        f"{kernel.share:7.1%} {kernel.total_ms:10.3f} ms {kernel.count:8d} x "
        f"{kernel.total_ms / kernel.count * 1e3:9.1f} us  {kernel.name[:NAME_CHARS]}"
        for kernel in timeline.kernels
    ]
    return "\n".join(lines)


def _busy_and_gaps(spans: Sequence[Span]) -> tuple[float, list[float]]:
    """Time covered by at least one of the spans, which are sorted by start, and the holes between."""
    busy_us = 0.0
    gaps_us = []
    covered_to = spans[0].start_us
    for span in spans:
        if span.start_us > covered_to:
            gaps_us.append(span.start_us - covered_to)
        busy_us += max(0.0, span.end_us - max(span.start_us, covered_to))
        covered_to = max(covered_to, span.end_us)
    return busy_us, gaps_us


def _by_kernel(spans: Sequence[Span], duration_us: float) -> tuple[KernelShare, ...]:
    counts: dict[str, int] = defaultdict(int)
    totals_us: dict[str, float] = defaultdict(float)
    for span in spans:
        counts[span.name] += 1
        totals_us[span.name] += span.duration_us
    shares = (
        KernelShare(name, counts[name], total_us / 1e3, total_us / duration_us) for name, total_us in totals_us.items()
    )
    return tuple(sorted(shares, key=lambda kernel: -kernel.total_ms))
