"""One workload with drafts and without, in turns: what speculative decoding gains, or costs, on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pagemill.bench.offline import GREEDY, Generator, run_timed
from pagemill.bench.workload import WorkItem
from pagemill.messages.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Turn:
    """Output tokens per second of one run each."""

    without: float
    with_drafts: float

    @property
    def ratio(self) -> float:
        """More than 1: drafts are faster."""
        return self.with_drafts / self.without


@dataclass(frozen=True, slots=True)
class Comparison:
    """What drafts changed at one number of requests, over all turns."""

    num_requests: int
    num_output_tokens: int
    """Of one run."""
    turns: list[Turn]
    num_draft_tokens: int
    """Drafts that were verified, in all turns."""
    num_accepted_tokens: int
    num_equal_outputs: int
    """Requests whose tokens were the same with drafts and without, in each turn."""


def compare_speculation(
    without: Generator,
    with_drafts: Generator,
    workload: Sequence[WorkItem],
    num_turns: int,
    sampling: Mapping[str, Any] = GREEDY,
) -> Comparison:
    """Run the workload on both engines in turns, after a run of each that is not counted. In every other turn, the one
    with drafts begins. `sampling` are SamplingParams by name, and should have a seed where they sample."""
    for llm in (without, with_drafts):
        run_timed(llm, workload, sampling)
    turns = []
    num_drafts = num_accepted = 0
    equal = [True] * len(workload)
    for number in range(num_turns):
        order = (False, True) if number % 2 == 0 else (True, False)
        runs = {drafts: run_timed(with_drafts if drafts else without, workload, sampling) for drafts in order}
        (plain, plain_s), (drafted, drafted_s) = runs[False], runs[True]
        turns.append(Turn(_num_tokens(plain) / plain_s, _num_tokens(drafted) / drafted_s))
        for place, (one, other) in enumerate(zip(plain, drafted, strict=True)):
            equal[place] &= one.outputs[0].token_ids == other.outputs[0].token_ids
            num_drafts += other.outputs[0].num_draft_tokens
            num_accepted += other.outputs[0].num_accepted_tokens
    return Comparison(len(workload), _num_tokens(plain), turns, num_drafts, num_accepted, sum(equal))


def comparison_table(found: Comparison) -> str:
    """A row for each turn and one for the medians, in tokens per second; then what became of the drafts."""
    ratios = [turn.ratio for turn in found.turns]
    rows = [(str(number), turn.without, turn.with_drafts, turn.ratio) for number, turn in enumerate(found.turns, 1)]
    middle = (median(turn.without for turn in found.turns), median(turn.with_drafts for turn in found.turns))
    lines = [f"{'tokens/s, turn':<16}{'without drafts':>16}{'with drafts':>14}{'ratio':>8}"]
    for name, plain, drafted, ratio in [*rows, ("median", *middle, median(ratios))]:
        lines.append(f"{name:<16}{plain:>16.1f}{drafted:>14.1f}{ratio:>8.2f}")
    lines.append(f"drafts accepted: {found.num_accepted_tokens} of {found.num_draft_tokens}")
    lines.append(f"equal outputs: {found.num_equal_outputs} of {found.num_requests}")
    return "\n".join(lines)


def _num_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)
