"""What a proposer of drafts guesses, and in which graphs, noted while it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.step import Int32Array
from pagemill.worker.forward.guess_graphs import FollowingGraphs, GuessGraphs
from pagemill.worker.spec_decode.interface import Proposer


def note_guesses(
    monkeypatch: pytest.MonkeyPatch, proposer: type[Proposer], note: Callable[[list[int], list[int]], object]
) -> None:
    """Call `note` with (text, drafts), lists of tokens, for every guess that this class of proposers makes."""
    propose = proposer.propose

    def noted(self: Any, slots: Int32Array) -> Sequence[Int32Array]:
        found = propose(self, slots)
        for slot, drafts in zip(slots.tolist(), found, strict=True):
            text = self._states.token_ids[slot, : self._states.num_tokens[slot]]
            note(text.tolist(), drafts.tolist())
        return found

    monkeypatch.setattr(proposer, "propose", noted)


def note_modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, GraphMode]]:
    """A list of ("follow" or "guess", what it ran in), of networks that guess on a device, which grows while they
    run."""
    ran: list[tuple[str, GraphMode]] = []
    follow, guess = FollowingGraphs._run_follow, GuessGraphs._run_guess

    def follows(self: Any, batch: Any, source: Any, count: int, mode: GraphMode) -> None:
        ran.append(("follow", mode))
        follow(self, batch, source, count, mode)

    def guesses(self: Any, packed: Any, count: int, mode: GraphMode) -> None:
        ran.append(("guess", mode))
        guess(self, packed, count, mode)

    monkeypatch.setattr(FollowingGraphs, "_run_follow", follows)
    monkeypatch.setattr(GuessGraphs, "_run_guess", guesses)
    return ran
