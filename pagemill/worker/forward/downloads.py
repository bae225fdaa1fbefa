"""What steps sampled, on its way from the device to the host: `Pending` tokens, log-probabilities, verified drafts.

Knows how results lie on the device; nothing about how they are computed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pagemill.messages.pending import Pending
from pagemill.messages.step import Int32Array
from pagemill.platforms.interface import Mark, Transfers
from pagemill.worker.batch.device_states import RESULT_TURNS
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.forward.interface import SampledTokens
from pagemill.worker.forward.mixed_batch import MixedShape
from pagemill.worker.sampling.logprobs import KnownValues, SampledValues, joined_samples


class Downloads:
    """Brings rows of `results` [turns, R] to the host, one after the other."""

    def __init__(self, transfers: Transfers, results: Tensor) -> None:
        self._transfers = transfers
        self._results = results
        self._host = transfers.host_buffer(tuple(results.shape), "int32")
        self._turn = -1
        self._under_way: deque[DownloadedTokens] = deque()

    @property
    def next_turn(self) -> int:
        """The row that the next step is to write."""
        return (self._turn + 1) % RESULT_TURNS

    def queued(self) -> None:
        """A step was queued that writes the next row."""
        self._turn = self.next_turn

    def start(self, count: int) -> "DownloadedTokens":
        """The first `count` tokens of the row that was queued last."""
        while self._under_way and (len(self._under_way) >= RESULT_TURNS - 1 or self._under_way[0].fetched):
            self._under_way.popleft().result()
        target = self._host[self._turn, :count]
        mark = self._transfers.download(target, self._results[self._turn, :count])
        tokens = DownloadedTokens(mark, target)
        self._under_way.append(tokens)
        return tokens


class DownloadedTokens:
    """`Pending` tokens on their way to host memory that is used again, so they are copied out of it."""

    def __init__(self, mark: Mark, target: Tensor) -> None:
        self._mark = mark
        self._target = target
        self._tokens: SampledTokens | None = None

    @property
    def fetched(self) -> bool:
        """Whether `result` was called."""
        return self._tokens is not None

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self._tokens is not None or self._mark.reached()

    def result(self) -> SampledTokens:
        """The tokens, waited for."""
        if self._tokens is None:
            self._mark.wait()
            self._tokens = SampledTokens(self._target.numpy().copy())
        return self._tokens


class ScoredTokens:
    """`Pending` tokens with their log-probabilities, and those of prompts: copies into memory of their own."""

    def __init__(
        self,
        tokens: Pending[SampledTokens],
        sampled: Sequence[SampledValues],
        prompts: Sequence[KnownValues],
        transfers: Transfers,
    ) -> None:
        self._tokens = tokens
        # What is copied is held until the copies are over.
        self._sampled = sampled
        self._prompts = prompts
        self._hosts: list[Tensor] = []
        self._marks: list[Mark] = []
        for packed in [part.values.packed for part in sampled] + [part.values.packed for part in prompts]:
            host = transfers.host_buffer(tuple(packed.shape), "int32")
            self._marks.append(transfers.download(host, packed))
            self._hosts.append(host)
        self._result: SampledTokens | None = None

    def ready(self) -> bool:
        """Whether all copies are done."""
        return self._result is not None or (self._tokens.ready() and all(mark.reached() for mark in self._marks))

    def result(self) -> SampledTokens:
        """Tokens and log-probabilities, waited for."""
        if self._result is None:
            tokens = self._tokens.result()
            for mark in self._marks:
                mark.wait()
            count = len(self._sampled)
            found = [part.message(host) for part, host in zip(self._sampled, self._hosts[:count], strict=True)]
            prompts = [part.message(host) for part, host in zip(self._prompts, self._hosts[count:], strict=True)]
            self._result = replace(tokens, logprobs=joined_samples(found), known_logprobs=tuple(prompts))
            self._sampled = ()
            self._prompts = ()
            self._hosts = []
        return self._result


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """How the results of a batch lie in which slots verify drafts: tokens of all rows, then how many each slot gets."""

    num_rows: int
    num_slots: int
    counts_start: int
    """As many rows, padding included, come before."""

    @classmethod
    def of(cls, batch: InputBatch, shape: MixedShape | None) -> "DraftedRows":
        """`shape`: what is sampled, where that is more than the batch."""
        num_rows = len(batch.sampled_slots)
        return cls(num_rows, len(batch.slot_rows.slots), num_rows if shape is None else shape.num_rows)

    @property
    def num_elements(self) -> int:
        """That are to be brought."""
        return self.counts_start + self.num_slots


class VerifiedTokens:
    """`Pending` tokens of a batch in which slots verify drafts."""

    def __init__(self, found: DownloadedTokens, rows: DraftedRows) -> None:
        self._found = found
        self._rows = rows

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self._found.ready()

    def result(self) -> SampledTokens:
        """The tokens and their counts, waited for."""
        found = self._found.result().token_ids
        rows = self._rows
        return SampledTokens(found[: rows.num_rows], counts=found[rows.counts_start : rows.num_elements])


class GuessDownloads:
    """Brings [R, drafts] guesses to the host, of one step at a time."""

    def __init__(self, transfers: Transfers, drafts: Tensor) -> None:
        self._transfers = transfers
        self._drafts = drafts
        self._host = transfers.host_buffer(tuple(drafts.shape), "int32")
        self._last: DownloadedGuesses | None = None

    def finish(self) -> None:
        """Wait for those that were asked for last: others may be computed then."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def start(self, count: int) -> "DownloadedGuesses":
        """Those of the first `count` requests, as work that is queued until now leaves them."""
        target = self._host[:count]
        self._last = DownloadedGuesses(self._transfers.download(target, self._drafts[:count]), target)
        return self._last


class DownloadedGuesses:
    """`Pending` guesses, copied out of memory that is used again."""

    def __init__(self, mark: Mark, target: Tensor) -> None:
        self._mark = mark
        self._target = target
        self._found: Int32Array | None = None

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self._found is not None or self._mark.reached()

    def result(self) -> Int32Array:
        """[R, drafts], waited for."""
        if self._found is None:
            self._mark.wait()
            self._found = self._target.numpy().copy()
        return self._found
