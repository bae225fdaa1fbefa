"""`Pooler`: hidden states of a step's tokens become vectors of the prompts that end in it.

Knows no requests, only slots. A prompt may come in several steps, whose share is kept per slot.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.pooling_params import POOLING_TYPES, PoolingParams, PoolingType
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import InputBatch

LAST, CLS, MEAN = range(len(POOLING_TYPES))
MIN_LENGTH = 1e-12
"""Shorter vectors are not scaled to length 1 but divided by this."""


class Pooler:
    """`pool` is called once for every batch, also for those in which no prompt ends.

    Letters in shapes: S slots, R requests and T tokens of a batch, L requests whose prompts end in it, E hidden size.
    """

    def __init__(self, num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._device = device
        self._hidden_size = hidden_size
        self._kinds = np.zeros(num_slots, np.int64)
        """[S] LAST, CLS or MEAN."""
        self._normalize = np.zeros(num_slots, bool)
        self._dimensions = np.zeros(num_slots, np.int64)
        self._kept: Tensor | None = None
        """[S, E] float32: the first hidden state, or the sum of all so far; made when it is first needed."""

    def add(self, new: NewRequest) -> None:
        """A request takes a slot. Steps of no request come with sampling parameters: their vectors are dropped."""
        params = new.params if isinstance(new.params, PoolingParams) else PoolingParams()
        self._kinds[new.slot] = POOLING_TYPES.index(params.pooling_type or PoolingType.LAST)
        self._normalize[new.slot] = bool(params.normalize)
        self._dimensions[new.slot] = params.dimensions or self._hidden_size

    def pool(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """[T, E] hidden states after the final norm, of which nothing is kept, to [L, E] float32. What lies behind a
        request's dimensions is 0."""
        kinds = self._kinds[batch.slots]
        if kinds.any():
            self._keep(batch, hidden, kinds)
        rows = hidden[torch.from_numpy(batch.logits_index).to(self._device)].float()
        ended = self._kinds[batch.sampled_slots]
        if ended.any():
            rows = self._from_kept(rows, batch, ended)
        return self._finish(rows, batch.sampled_slots)

    def _keep(self, batch: InputBatch, hidden: Tensor, kinds: npt.NDArray[np.int64]) -> None:
        """Add what this step's tokens contribute to slots that need more than their last token."""
        if self._kept is None:
            self._kept = torch.zeros(len(self._kinds), self._hidden_size, device=self._device)
        starts = batch.query_start[:-1]
        counts = np.diff(batch.query_start)
        begins = batch.seq_lens == counts  # all tokens so far are of this step
        slots = batch.slots
        means = kinds == MEAN
        self._kept[self._index(slots[begins & means])] = 0.0
        firsts = begins & (kinds == CLS)
        if firsts.any():
            self._kept[self._index(slots[firsts])] = hidden[self._index(starts[firsts])].float()
        if means.any():
            tokens = np.repeat(means, counts)
            summed = hidden[self._index(np.flatnonzero(tokens))].float()
            self._kept.index_add_(0, self._index(batch.token_slots[tokens]), summed)

    def _from_kept(self, rows: Tensor, batch: InputBatch, kinds: npt.NDArray[np.int64]) -> Tensor:
        if self._kept is None:
            raise RuntimeError("a prompt ended before any of it was kept")
        lengths = np.where(kinds == MEAN, batch.sampled_positions, 1)
        kept = self._kept[self._index(batch.sampled_slots)] / self._column(lengths.astype(np.float32))
        return torch.where(self._column(kinds == LAST), rows, kept)

    def _finish(self, rows: Tensor, slots: npt.NDArray[np.int32]) -> Tensor:
        dimensions = self._dimensions[slots]
        if (dimensions < self._hidden_size).any():
            behind = torch.arange(self._hidden_size, device=self._device) >= self._column(dimensions)
            rows = rows.masked_fill(behind, 0.0)
        normalize = self._normalize[slots]
        if not normalize.any():
            return rows
        lengths = rows.norm(dim=1, keepdim=True).clamp_min(MIN_LENGTH)
        return torch.where(self._column(normalize), rows / lengths, rows)

    def _index(self, numbers: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)

    def _column(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(1)
