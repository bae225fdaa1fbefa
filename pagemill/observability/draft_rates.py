"""`DraftRates`: how many drafts were right since somebody last asked, as a line. Does not know who asks for it."""

from collections.abc import Iterable
from itertools import zip_longest

from pagemill.messages.stats import DraftCounts, SchedulerStats


class DraftRates:
    """Counts that shrank, because an engine started again, begin at 0."""

    def __init__(self) -> None:
        self._before = DraftCounts()

    def line(self, engines: Iterable[SchedulerStats], elapsed_s: float) -> str | None:
        """Of what engines have counted until now, `elapsed_s` after the last call; None where no draft was verified
        since. Mean acceptance length: tokens that a step yields a request that has drafts."""
        now = _sum([stats.drafts for stats in engines if stats.drafts is not None])
        before = self._before if now.num_drafts >= self._before.num_drafts else DraftCounts()
        self._before = now
        num_drafts = now.num_drafts - before.num_drafts
        if num_drafts <= 0:
            return None
        drafted = now.num_draft_tokens - before.num_draft_tokens
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        pairs = zip_longest(now.num_accepted_per_pos, before.num_accepted_per_pos, fillvalue=0)
        by_place = ", ".join(f"{(count - old) / num_drafts:.3f}" for count, old in pairs)
        return (
            f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / num_drafts:.2f}, "
            f"Accepted throughput: {accepted / elapsed_s:.2f} tokens/s, "
            f"Drafted throughput: {drafted / elapsed_s:.2f} tokens/s, "
            f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {by_place}, Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
        )


def _sum(parts: list[DraftCounts]) -> DraftCounts:
    places = zip_longest(*(part.num_accepted_per_pos for part in parts), fillvalue=0)
    return DraftCounts(
        sum(part.num_drafts for part in parts),
        sum(part.num_draft_tokens for part in parts),
        tuple(map(sum, places)),
    )
