"""Figures of a load test: throughput, and what its users felt. Knows times and counts, not HTTP.

TTFT: time to the first piece. ITL: time between pieces. TPOT: mean time per token after the first, per request.
E2EL: time to the last piece.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagemill.bench.load import Sent
from pagemill.bench.summary import Summary, summarize
from pagemill.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServingReport:
    """Of one load test; failed requests count in num_failed only."""

    num_completed: int
    num_failed: int
    first_error: str | None
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests_per_s: float | None
    """Requests per second that met every goal; None without goals."""
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2el: Summary | None


def make_report(results: Sequence[Sent], goals_ms: Mapping[str, float] | None = None) -> ServingReport:
    """Figures of the results. `goals_ms` gives the most milliseconds of any of GOALS that count as good."""
    done = [sent for sent in results if sent.error is None and sent.piece_times_s]
    errors = [sent.error or "no text" for sent in results if sent.error is not None or not sent.piece_times_s]
    start_s = min((sent.start_s for sent in results), default=0.0)
    duration_s = max((sent.piece_times_s[-1] for sent in done), default=start_s) - start_s
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_prompt_tokens = sum(sent.num_prompt_tokens for sent in done)
    num_output_tokens = sum(sent.num_output_tokens for sent in done)
    tpots_s = [_tpot_s(sent) for sent in done if sent.num_output_tokens > 1]
    gaps_s = [gap for sent in done for gap in np.diff(sent.piece_times_s).tolist()]
    num_good = sum(_is_good(sent, goals_ms) for sent in done) if goals_ms else None
    return ServingReport(
        num_completed=len(done),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=num_output_tokens * per_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) * per_s,
        good_requests_per_s=None if num_good is None else num_good * per_s,
        ttft=summarize([_ttft_s(sent) for sent in done]),
        tpot=summarize(tpots_s),
        itl=summarize(gaps_s),
        e2el=summarize([_e2el_s(sent) for sent in done]),
    )


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as milliseconds by name. Raises ConfigError."""
    goals_ms = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goals_ms[name] = float(limit)
        except ValueError:
            goals_ms[name] = 0.0
        if name not in GOALS or not goals_ms[name] > 0:
            raise ConfigError(f"goodput={word!r} is not allowed: NAME:MILLISECONDS with NAME one of {', '.join(GOALS)}")
    return goals_ms


def _ttft_s(sent: Sent) -> float:
    return sent.piece_times_s[0] - sent.start_s


def _e2el_s(sent: Sent) -> float:
    return sent.piece_times_s[-1] - sent.start_s


def _tpot_s(sent: Sent) -> float:
    """0 for a single token, which has no successor."""
    return (sent.piece_times_s[-1] - sent.piece_times_s[0]) / max(1, sent.num_output_tokens - 1)


def _is_good(sent: Sent, goals_ms: Mapping[str, float]) -> bool:
    felt_s = {"ttft": _ttft_s(sent), "tpot": _tpot_s(sent), "e2el": _e2el_s(sent)}
    return all(felt_s[name] * 1e3 <= limit_ms for name, limit_ms in goals_ms.items())
