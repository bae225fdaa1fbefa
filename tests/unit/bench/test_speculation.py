from typing import Any

import pytest

from pagemill.bench.speculation import Comparison, Turn, compare_speculation, comparison_table
from pagemill.bench.workload import WorkItem
from pagemill.messages.outputs import CompletionOutput, RequestOutput

WORK = [WorkItem([1, 2, 3], 4), WorkItem([5], 2)]


class FakeLLM:
    """Notes when it runs; says other tokens of the second request in its third run, where `differs`."""

    def __init__(self, name: str, log: list[str], *, drafts: int = 0, differs: bool = False) -> None:
        self.name = name
        self.log = log
        self.drafts = drafts
        self.differs = differs

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        self.log.append(self.name)
        assert all(params.ignore_eos and params.seed == 7 for params in sampling_params)
        last = 9 if self.differs and self.log.count(self.name) == 3 else 8
        tokens = [[7] * sampling_params[0].max_tokens, [last] * sampling_params[1].max_tokens]
        drafts = {"num_draft_tokens": 2 * self.drafts, "num_accepted_tokens": self.drafts}
        return [RequestOutput("r", None, [], [CompletionOutput(0, "", ids, **drafts)], True) for ids in tokens]


@pytest.mark.parametrize("differs", [False, True])
def test_engines_run_in_turns_and_their_outputs_are_compared(differs: bool) -> None:
    log: list[str] = []
    without, with_drafts = FakeLLM("plain", log), FakeLLM("drafts", log, drafts=3, differs=differs)
    found = compare_speculation(without, with_drafts, WORK, 3, {"temperature": 0.0, "seed": 7})
    assert log == ["plain", "drafts", *["plain", "drafts"], *["drafts", "plain"], *["plain", "drafts"]]
    assert (found.num_requests, found.num_output_tokens, len(found.turns)) == (2, 6, 3)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (36, 18)
    assert found.num_equal_outputs == (1 if differs else 2)


def test_the_table_has_a_ratio_in_every_row() -> None:
    turns = [Turn(50.0, 100.0), Turn(40.0, 60.0), Turn(80.0, 40.0)]
    lines = comparison_table(Comparison(2, 6, turns, 36, 18, 2)).splitlines()
    assert [line.split()[-3:] for line in lines[1:5]] == [
        ["50.0", "100.0", "2.00"],
        ["40.0", "60.0", "1.50"],
        ["80.0", "40.0", "0.50"],
        ["50.0", "60.0", "1.50"],
    ]
    assert lines[5:] == ["drafts accepted: 18 of 36", "equal outputs: 2 of 2"]
