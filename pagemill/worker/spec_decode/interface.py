"""`Proposer`: guesses the tokens that follow. Knows slots, not requests, and nothing about how guesses are verified."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.messages.step import Int32Array
from pagemill.worker.batch.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which proposer a worker has, and how much it may propose."""

    proposer: str
    """Name in catalog/proposers.py."""
    max_drafts: int
    """Tokens of one slot for one step, > 0."""


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer is built with. It reads it and changes nothing in it."""

    states: RequestStates
    """By slot: all tokens that are known are there when `propose` is called."""
    max_drafts: int
    """Longer guesses are cut."""


class Proposer(ABC):
    """One per worker. The ranks of a replica must propose the same: a guess follows from the slots' tokens and from
    nothing that differs between ranks."""

    def __init__(self, context: ProposerContext) -> None:  # noqa: B027 - for those that need nothing of it
        """`context` lives as long as the worker has a KV cache."""

    @abstractmethod
    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        """[L] slots that have sampled just now -> for each, the tokens that may follow its last one; none is a guess
        too. Valid token ids; a wrong one costs time and changes no output."""
