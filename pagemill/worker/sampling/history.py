"""`TokenHistory`: the tokens of slots where the logits are, for processors that look at what was said before.

`HostHistory` reads the slots' state. `DeviceHistory` keeps copies that grow on the device as tokens are sampled, so
that a step which runs ahead needs nothing from the host. Only slots that are watched have a history.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.step import KnownTokens, NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.uploads import LatestUpload

_FEWEST_ROWS = 8
_FEWEST_TOKENS = 512


class TokenHistory(ABC):
    """Tokens of the rows that are about to be sampled: all that are known, prompt first. K rows, N tokens of the
    longest, V vocabulary.

    `watch`, `forget`, `replace` and `append` are for a history that keeps copies."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @abstractmethod
    def tokens(self, rows: SampledRows) -> Tensor:
        """[K, N] int64 ids, anything valid behind a row's last."""

    @abstractmethod
    def tokens_at(self, rows: SampledRows, positions: Tensor) -> Tensor:
        """[K, M] int64 ids, from [K, M] int64 positions in each row's request."""

    @abstractmethod
    def lengths(self, rows: SampledRows) -> tuple[Tensor, Tensor]:
        """[K, 1] int64 tokens of each row's prompt, and [K, 1] of all: `rows.positions`."""

    def watch(self, new: NewRequest) -> None:  # noqa: B027
        """Begin the history of a slot."""

    def forget(self, slot: int) -> None:  # noqa: B027
        """End it; slots without one are ignored."""

    def replace(self, known: KnownTokens) -> None:  # noqa: B027
        """Tokens of a watched slot in place of those from their position on."""

    def append(self, rows: SampledRows, tokens: Tensor) -> None:  # noqa: B027
        """[K] the tokens that watched rows sampled; a negative one stands for token 0."""

    def expect(self, rows: SampledRows, tokens: Tensor) -> None:  # noqa: B027
        """[K] the drafts that follow watched rows, for rows of the same slots that come later; a negative one stands
        for token 0."""

    def output_counts(self, rows: SampledRows) -> Tensor:
        """[K, V] int32: how often each token was generated."""
        ids, (prompts, lengths) = self.tokens(rows), self.lengths(rows)
        at = torch.arange(ids.shape[1], device=ids.device)
        return self._count(ids, (at >= prompts) & (at < lengths))

    def seen(self, rows: SampledRows) -> Tensor:
        """[K, V] bool: whether each token is in the prompt or was generated."""
        ids, (_, lengths) = self.tokens(rows), self.lengths(rows)
        return self._count(ids, torch.arange(ids.shape[1], device=ids.device) < lengths) > 0

    def last_outputs(self, rows: SampledRows, count: int) -> Tensor:
        """[K, count] int64: the last tokens that were generated, -1 before the first."""
        prompts, lengths = self.lengths(rows)
        at = lengths - count + torch.arange(count, device=lengths.device)
        return self.tokens_at(rows, at.clamp(min=0)).masked_fill_(at < prompts, -1)

    def _count(self, ids: Tensor, which: Tensor) -> Tensor:
        counts = torch.zeros(len(ids), self._vocab_size, dtype=torch.int32, device=ids.device)
        return counts.scatter_add_(1, ids, which.int())


class HostHistory(TokenHistory):
    """The slots' own tokens: all that were sampled are there before the next step is."""

    def __init__(self, states: RequestStates, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._states = states

    def tokens(self, rows: SampledRows) -> Tensor:
        return torch.from_numpy(self._states.token_ids[rows.slots, : int(rows.positions.max())].astype(np.int64))

    def tokens_at(self, rows: SampledRows, positions: Tensor) -> Tensor:
        ids = self._states.token_ids[rows.slots[:, None], positions.numpy()]
        return torch.from_numpy(ids.astype(np.int64))

    def lengths(self, rows: SampledRows) -> tuple[Tensor, Tensor]:
        prompts = self._states.num_prompt_tokens[rows.slots].astype(np.int64)
        return torch.from_numpy(prompts).unsqueeze(1), torch.from_numpy(rows.positions).unsqueeze(1)


class DeviceHistory(TokenHistory):
    """Copies, in rows of one tensor that grows with what is watched: as many rows, and as long.

    `counts_ahead`: lengths are counted here, one token for each sample. Otherwise they are the positions of the rows,
    several of which may be of one slot that verifies drafts."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, counts_ahead: bool = True) -> None:
        super().__init__(vocab_size)
        self._device = device
        self._place = np.full(num_slots, -1, np.int64)
        """[S] row of `_ids`; -1: not watched."""
        self._free: list[int] = []
        self._ids = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._prompts = torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = LatestUpload(device)
        self._counts_ahead = counts_ahead
        self._positions = LatestUpload(device)

    @torch.inference_mode()
    def watch(self, new: NewRequest) -> None:
        self.forget(new.slot)
        count = len(new.token_ids)
        if not self._free:
            self._grow(max(_FEWEST_ROWS, 2 * len(self._ids)), self._ids.shape[1])
        self._make_long(count + 1)
        place = self._place[new.slot] = self._free.pop()
        ids = torch.from_numpy(np.ascontiguousarray(new.token_ids, np.int32))
        self._ids[place, :count].copy_(ids, non_blocking=True)
        self._num_tokens[place] = count
        self._prompts[place] = new.num_prompt_tokens

    def forget(self, slot: int) -> None:
        if self._place[slot] >= 0:
            self._free.append(int(self._place[slot]))
            self._place[slot] = -1

    @torch.inference_mode()
    def replace(self, known: KnownTokens) -> None:
        end = known.position + len(known.token_ids)
        self._make_long(end + 1)
        place = self._place[known.slot]
        ids = torch.from_numpy(np.ascontiguousarray(known.token_ids, np.int32))
        self._ids[place, known.position : end].copy_(ids, non_blocking=True)
        self._num_tokens[place] = end

    def tokens(self, rows: SampledRows) -> Tensor:
        return self._ids[:, : int(rows.positions.max())].index_select(0, self._places(rows)).long()

    def tokens_at(self, rows: SampledRows, positions: Tensor) -> Tensor:
        return self._ids[self._places(rows).unsqueeze(1), positions].long()

    def lengths(self, rows: SampledRows) -> tuple[Tensor, Tensor]:
        places = self._places(rows)
        prompts = self._prompts.index_select(0, places)
        return prompts.unsqueeze(1), self._lengths(rows, places).unsqueeze(1)

    @torch.inference_mode()
    def append(self, rows: SampledRows, tokens: Tensor) -> None:
        self._make_long(int(rows.positions.max()) + 1)
        places = self._places(rows)
        lengths = self._lengths(rows, places)
        self._ids[places, lengths] = tokens.clamp(min=0).int()
        if self._counts_ahead:
            self._num_tokens.index_copy_(0, places, lengths + 1)

    @torch.inference_mode()
    def expect(self, rows: SampledRows, tokens: Tensor) -> None:
        # Where a slot's last row has no draft, its token is written when it is sampled.
        self._make_long(int(rows.positions.max()) + 1)
        self._ids[self._places(rows), self._positions.of(rows.positions)] = tokens.clamp(min=0).int()

    def _lengths(self, rows: SampledRows, places: Tensor) -> Tensor:
        if self._counts_ahead:
            return self._num_tokens.index_select(0, places)
        return self._positions.of(rows.positions)

    def _places(self, rows: SampledRows) -> Tensor:
        return self._rows.of(self._place[rows.slots])

    def _make_long(self, num_tokens: int) -> None:
        if num_tokens > self._ids.shape[1]:
            self._grow(len(self._ids), max(_FEWEST_TOKENS, 1 << (num_tokens - 1).bit_length()))

    def _grow(self, num_rows: int, num_tokens: int) -> None:
        before = self._ids
        count = len(self._ids)
        self._ids = torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=self._device)
        self._ids[:count, : before.shape[1]] = before
        added = torch.zeros(num_rows - count, dtype=torch.int64, device=self._device)
        self._num_tokens = torch.cat([self._num_tokens, added])
        self._prompts = torch.cat([self._prompts, added])
        self._free += range(count, num_rows)
