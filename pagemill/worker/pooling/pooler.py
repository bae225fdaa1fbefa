"""`Pooler`: hidden states of a step's tokens become what is asked of the prompts that end in it: vectors, or logits of
classes, of a prompt or of each token.

Knows no requests, only slots. A prompt may come in several steps, whose share is kept per slot.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.config.pooling_facts import Activation
from pagemill.messages.pooling_params import POOLING_TYPES, PoolingParams, PoolingType
from pagemill.messages.step import NewRequest
from pagemill.model.kernels import ops
from pagemill.worker.batch.input_batch import InputBatch

LAST, CLS, MEAN, ALL, STEP = range(len(POOLING_TYPES))
NO_TOKEN = -1
MIN_LENGTH = 1e-12
"""Shorter vectors are not scaled to length 1 but divided by this."""

Head = Callable[[Tensor], Tensor]


class Pooled(NamedTuple):
    """What became of the prompts that ended."""

    rows: Tensor
    """[N, W] float32, prompt after prompt. What lies behind a request's width is 0."""
    counts: npt.NDArray[np.int32] | None = None
    """[L] rows of each; None: one each."""


class Pooler:
    """`pool` is called once for every batch, also for those in which no prompt ends.

    Letters in shapes: S slots, R requests and T tokens of a batch, L requests whose prompts end in it, E hidden size,
    W numbers of a row: E, or the classes of a head.
    """

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        device: torch.device,
        head: Head | None = None,
        num_outputs: int | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        """`head`: [N, E] -> [N, num_outputs] of rows that are pooled, where there is one; `activation`: of what it
        gives."""
        self._device = device
        self._hidden_size = hidden_size
        self._head = head
        self._width = hidden_size if head is None else num_outputs or hidden_size
        self._activation = activation
        self._kinds = np.zeros(num_slots, np.int64)
        """[S] LAST, CLS, MEAN, ALL or STEP."""
        self._normalize = np.zeros(num_slots, bool)
        self._activates = np.zeros(num_slots, bool)
        self._dimensions = np.zeros(num_slots, np.int64)
        self._step_tags = np.full(num_slots, NO_TOKEN, np.int64)
        self._second_at = np.full(num_slots, np.iinfo(np.int64).max, np.int64)
        """[S] the position of a second text's first token."""
        self._columns: dict[int, list[int]] = {}
        """By slot: the classes that are asked for, where not all are."""
        self._kept: Tensor | None = None
        """[S, E] float32: the first hidden state, or the sum of all so far; made when it is first needed."""
        self._parts: dict[int, list[Tensor]] = {}
        """By slot: [n, E] hidden states of each step so far, of those that are asked for."""

    def add(self, new: NewRequest) -> None:
        """A request takes a slot. Steps of no request come with sampling parameters: their vectors are dropped."""
        params = new.params if isinstance(new.params, PoolingParams) else PoolingParams()
        slot = new.slot
        self._kinds[slot] = POOLING_TYPES.index(params.pooling_type or PoolingType.LAST)
        self._normalize[slot] = bool(params.normalize)
        self._activates[slot] = bool(params.use_activation)
        self._dimensions[slot] = params.width or self._width
        self._step_tags[slot] = NO_TOKEN if params.step_tag_id is None else params.step_tag_id
        second = params.second_text_at
        self._second_at[slot] = np.iinfo(np.int64).max if second is None else second
        self._parts.pop(slot, None)
        self._columns.pop(slot, None)
        if params.returned_token_ids is not None:
            self._columns[slot] = list(params.returned_token_ids)

    def remove(self, slot: int) -> None:
        """A slot is released; what it kept of a prompt that did not end goes."""
        self._parts.pop(slot, None)

    def token_types(self, batch: InputBatch) -> Tensor | None:
        """[T] int64, 1 for tokens of a second text; None where no prompt of the batch has one."""
        second = batch.positions >= self._second_at[batch.token_slots]
        return torch.from_numpy(second.astype(np.int64)).to(self._device) if second.any() else None

    def pool(self, batch: InputBatch, hidden: Tensor) -> Pooled:
        """[T, E] hidden states after the final norm, of which nothing is kept, to those that are asked for, by what
        follows pooling."""
        kinds = self._kinds[batch.slots]
        if kinds.any():
            self._keep(batch, hidden, kinds)
        slots = batch.sampled_slots
        rows = hidden[torch.from_numpy(batch.logits_index).to(self._device)].float()
        ended = self._kinds[slots]
        if ((ended == CLS) | (ended == MEAN)).any():
            rows = self._from_kept(rows, batch, ended)
        if not (ended >= ALL).any():
            return Pooled(self._finish(rows, slots))
        parts = [self._taken(int(slot)) if kind >= ALL else rows[index : index + 1]
                 for index, (slot, kind) in enumerate(zip(slots, ended, strict=True))]  # fmt: skip
        counts = np.array([len(part) for part in parts], np.int32)
        return Pooled(self._finish(torch.cat(parts), np.repeat(slots, counts)), counts)

    def _keep(self, batch: InputBatch, hidden: Tensor, kinds: npt.NDArray[np.int64]) -> None:
        """Add what this step's tokens contribute to slots that need more than their last token."""
        starts = batch.query_start[:-1]
        counts = np.diff(batch.query_start)
        slots = batch.slots
        for row in np.flatnonzero(kinds >= ALL).tolist():
            self._keep_tokens(batch, hidden, row)
        pooled = (kinds == CLS) | (kinds == MEAN)
        if not pooled.any():
            return
        if self._kept is None:
            self._kept = torch.zeros(len(self._kinds), self._hidden_size, device=self._device)
        begins = batch.seq_lens == counts  # all tokens so far are of this step
        means = kinds == MEAN
        self._kept[self._index(slots[begins & means])] = 0.0
        firsts = begins & (kinds == CLS)
        if firsts.any():
            self._kept[self._index(slots[firsts])] = hidden[self._index(starts[firsts])].float()
        if means.any():
            owners = torch.from_numpy(np.where(means, slots, -1).astype(np.int64))
            ops.sum_rows_(self._kept, hidden.contiguous(), torch.from_numpy(batch.query_start.astype(np.int64)), owners)

    def _keep_tokens(self, batch: InputBatch, hidden: Tensor, row: int) -> None:
        slot = int(batch.slots[row])
        tokens = slice(int(batch.query_start[row]), int(batch.query_start[row + 1]))
        own = hidden[tokens]
        if self._kinds[slot] == STEP and self._step_tags[slot] != NO_TOKEN:
            tagged = np.flatnonzero(batch.token_ids[tokens] == self._step_tags[slot])
            own = own[self._index(tagged)]
        if batch.seq_lens[row] == tokens.stop - tokens.start:
            self._parts[slot] = []  # it begins, perhaps anew
        self._parts.setdefault(slot, []).append(own.float())

    def _taken(self, slot: int) -> Tensor:
        """[n, E] all that was kept of a prompt."""
        parts = self._parts.pop(slot)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _from_kept(self, rows: Tensor, batch: InputBatch, kinds: npt.NDArray[np.int64]) -> Tensor:
        if self._kept is None:
            raise RuntimeError("a prompt ended before any of it was kept")
        lengths = np.where(kinds == MEAN, batch.sampled_positions, 1)
        kept = self._kept[self._index(batch.sampled_slots)] / self._column(lengths.astype(np.float32))
        return torch.where(self._column((kinds == CLS) | (kinds == MEAN)), kept, rows)

    def _finish(self, rows: Tensor, slots: npt.NDArray[np.int32]) -> Tensor:
        """[N, E], of these [N] slots -> [N, W]: the head, the classes and dimensions that are asked for, and what makes
        probabilities or unit vectors of them."""
        if self._head is not None:
            rows = self._head(rows)
        for slot, columns in self._columns.items():
            own = self._index(np.flatnonzero(slots == slot))
            rows[own, : len(columns)] = rows[own][:, columns]
        dimensions = self._dimensions[slots]
        behind = None
        if (dimensions < self._width).any():
            behind = torch.arange(self._width, device=self._device) >= self._column(dimensions)
            rows = rows.masked_fill(behind, 0.0)
        if self._activation is not Activation.NONE and self._activates[slots].any():
            rows = torch.where(self._column(self._activates[slots]), self._activated(rows, behind), rows)
        normalize = self._normalize[slots]
        if not normalize.any():
            return rows
        lengths = rows.norm(dim=1, keepdim=True).clamp_min(MIN_LENGTH)
        return torch.where(self._column(normalize), rows / lengths, rows)

    def _activated(self, rows: Tensor, behind: Tensor | None) -> Tensor:
        if self._activation is Activation.SIGMOID:
            found = rows.sigmoid()
            return found if behind is None else found.masked_fill(behind, 0.0)
        return (rows if behind is None else rows.masked_fill(behind, -torch.inf)).softmax(1)

    def _index(self, numbers: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)

    def _column(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(1)
