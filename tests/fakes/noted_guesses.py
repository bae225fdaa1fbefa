"""What a proposer of drafts guesses, noted while it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagemill.messages.step import Int32Array
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
