"""What a proposer of drafts guesses, and in which graphs, noted while it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.messages.step import Int32Array
from pagemill.worker.forward.drafted_steps import DraftedSteps
from pagemill.worker.forward.guess_graphs import FollowingGraphs, GuessGraphs
from pagemill.worker.spec_decode.drafts import GuessedDrafts, SlotDrafts
from pagemill.worker.spec_decode.interface import Proposer


def note_guesses(
    monkeypatch: pytest.MonkeyPatch, proposer: type[Proposer], note: Callable[[list[int], list[int]], object]
) -> None:
    """Call `note` with (text, drafts), lists of tokens, for every guess that this class of proposers makes, or that a
    device makes in its place."""
    propose, taken = proposer.propose, SlotDrafts._taken

    def note_all(states: Any, slots: Int32Array, found: Sequence[Int32Array]) -> None:
        for slot, drafts in zip(slots.tolist(), found, strict=True):
            note(states.token_ids[slot, : states.num_tokens[slot]].tolist(), drafts.tolist())

    def noted(self: Any, slots: Int32Array) -> Sequence[Int32Array]:
        found = propose(self, slots)
        note_all(self._states, slots, found)
        return found

    def noted_behind(self: Any, slots: Int32Array, room: Int32Array, guessed: Int32Array) -> list[Int32Array]:
        found = taken(self, slots, room, guessed)
        if type(self._proposer) is proposer:
            note_all(self._states, slots, found)
        return found

    def noted_late(self: Any, slots: Int32Array, guessed: Any) -> Any:
        texts = [self._states.token_ids[slot, : self._states.num_tokens[slot]].tolist() for slot in slots.tolist()]
        found = take(self, slots, guessed)
        if isinstance(found, GuessedDrafts) and type(self._proposer) is proposer:
            late.append((found, texts))
        for drafts, texts in [pair for pair in late if pair[0].ready()]:
            late.remove((drafts, texts))
            ends = np.cumsum(drafts.result().counts)[:-1]
            for text, ids in zip(texts, np.split(drafts.result().token_ids, ends), strict=True):
                note(text, ids.tolist())
        return found

    late: list[Any] = []
    take = SlotDrafts.take_guesses
    monkeypatch.setattr(SlotDrafts, "take_guesses", noted_late)
    monkeypatch.setattr(proposer, "propose", noted)
    monkeypatch.setattr(SlotDrafts, "_taken", noted_behind)


def guesses_by_text(monkeypatch: pytest.MonkeyPatch, proposer: type[Proposer]) -> dict[tuple[int, ...], list[int]]:
    """Text -> drafts, of every guess from now on."""
    seen: dict[tuple[int, ...], list[int]] = {}
    note_guesses(monkeypatch, proposer, lambda text, drafts: seen.update({tuple(text): drafts}))
    return seen


def note_modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, GraphMode]]:
    """A list of ("follow", "guess" or, behind a step, "both", and what it ran in), of networks that guess on a device,
    which grows while they run."""
    ran: list[tuple[str, GraphMode]] = []
    follow, guess, go_on = FollowingGraphs._run_follow, GuessGraphs._run_guess, DraftedSteps._guess_behind

    def follows(self: Any, batch: Any, source: Any, count: int, mode: GraphMode) -> None:
        ran.append(("follow", mode))
        follow(self, batch, source, count, mode)

    def guesses(self: Any, packed: Any, count: int, mode: GraphMode) -> None:
        ran.append(("guess", mode))
        guess(self, packed, count, mode)

    def goes_on(self: Any, step: Any, mode: GraphMode) -> bool:
        found = go_on(self, step, mode)
        if found:
            ran.append(("both", mode))
        return found

    monkeypatch.setattr(DraftedSteps, "_guess_behind", goes_on)
    monkeypatch.setattr(FollowingGraphs, "_run_follow", follows)
    monkeypatch.setattr(GuessGraphs, "_run_guess", guesses)
    return ran
