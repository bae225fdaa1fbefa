"""`Forward`: the network and the sampler, for one batch after another. Knows no scheduler."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagemill.messages.pending import Pending
from pagemill.messages.step import Int32Array, KnownLogprobs, KnownTokens, NewRequest, SampledLogprobs
from pagemill.platforms.interface import Transfers
from pagemill.worker.batch.buffers import UploadRing
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.native.decode_step import Decoded
from pagemill.worker.spec_decode.interface import GuessSteps

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step sampled, in the order of the batch."""

    token_ids: Int32Array
    """[L]."""
    vectors: Vectors | None = None
    """[N, W] what was made of prompts instead, of a pooling model; the tokens are 0 then."""
    logprobs: SampledLogprobs | None = None
    known_logprobs: tuple[KnownLogprobs, ...] = ()
    counts: Int32Array | None = None
    """[slots that sampled] tokens that each of them gets, where slots verified drafts and the device compared; the rest
    of its L is void."""
    row_counts: Int32Array | None = None
    """[L] rows of `vectors` for each prompt; None: one each."""


class GuessesBehind(Protocol):
    """Guesses that are queued behind a step whose tokens nobody has waited for."""

    def guess_with(self, steps: GuessSteps, transfers: Transfers) -> None:
        """Who guesses; told once, before anything runs."""

    def guess(self, batch: InputBatch) -> Pending[Int32Array] | None:
        """Of a batch that was sampled just now: [slots that sampled, drafts], -1 from where there is none. None, and
        nothing is queued, where that was no step of a graph in which all verify drafts."""


class Forward(ABC):
    """`run` and `sample` alternate; `decode` and `complete` stand for both. What a step changes of a slot is told
    before: `remove`, then `add`, then `replace`."""

    @abstractmethod
    def add(self, new: NewRequest) -> None:
        """A request takes a slot; its state and blocks are there already."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """A slot is released. May be told twice."""

    def replace(self, known: KnownTokens) -> None:  # noqa: B027 - vectors follow from prompts
        """Tokens of a slot that were not sampled; the slot's state has them already."""

    runs_ahead: bool = False
    """Whether `run` and `sample` return before the work is done. Otherwise tokens are needed by the next `run`."""
    has_known_logprobs: bool = False
    """Whether the batch that was run last computed what comes before known tokens that are scored."""
    num_graphs: int = 0
    """Graphs that there may be in the end."""
    uploads: UploadRing | None = None
    """What is sent to a device ahead of its work."""
    behind: "GuessesBehind | None" = None
    """What queues guesses behind steps, where a device may."""
    decodes_natively: bool = False
    """Whether `decode` takes any step at all."""

    def precompile(self) -> None:  # noqa: B027
        """Run what steps and graphs are made of, at sizes of all kinds, and capture nothing."""

    def run_largest(self) -> None:  # noqa: B027
        """Take the memory of what steps may need beside the largest batches, for it to be measured. No request has a
        slot."""

    def capture_at_start(self) -> None:  # noqa: B027 - without graphs there is nothing to do
        """Capture what must be there before the first request. No request has a slot."""

    def capture_one(self) -> bool:
        """Capture one more graph, while no request has a slot; False when all are."""
        return False

    def decode(self, slots: Int32Array, num_tokens: Int32Array) -> Decoded | None:
        """[R] slots of a step and the tokens that each computes, with drafts -> what they sampled, which is in the
        slots' state, and counted, when it returns; slots that are `processed` are not sampled yet. None, and nothing
        has happened, where that is not all one piece of work: `run` and `sample` then do it."""
        return None

    def complete(self, slots: Int32Array, decoded: Decoded) -> SampledLogprobs | None:
        """After `decode` of these [R] slots: sample those that are `processed`, into the tokens that it returned; the
        log-probabilities, where slots ask for them."""
        return None

    @abstractmethod
    def run(self, batch: InputBatch) -> None:
        """The network, or what it takes to start it; keeps the rows to be sampled. Slots' counts of computed tokens are
        those before the step."""

    @abstractmethod
    def sample(self, batch: InputBatch) -> Pending[SampledTokens]:
        """Sample the rows that `run` kept, of the same batch. Not called when it has none, unless
        `has_known_logprobs`."""
