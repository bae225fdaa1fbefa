"""`MasksOfWorker`: the workers' half of the step extension "grammar_masks": which tokens slots may sample."""

import numpy as np
import torch
from torch import Tensor

from pagemill.messages.grammar_masks import FormsBegun, GrammarMasks
from pagemill.messages.step import Int32Array
from pagemill.model.kernels import ops
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.row_masks import ANY_TOKEN, RowMasks
from pagemill.worker.extensions.interface import WorkerContext, WorkerExtension

_ANYTHING = -1
"""A word of tokens that may all come."""


class MasksOfWorker(WorkerExtension):
    """Those of the step that is sampled."""

    def __init__(self, context: WorkerContext) -> None:
        self._device = context.device
        self._states = context.states
        self._rows: dict[int, int] = {}
        """Slot -> the mask of its next token."""
        self._after_drafts: dict[int, list[int]] = {}
        """Slot -> the masks of the tokens after each of its drafts."""
        self._masks = np.zeros((0, 0), np.int32)
        self._began: set[int] = set()

    def begin(self, payload: FormsBegun) -> None:
        self._began = set(payload.slots)

    def begin_sampling(self, payload: GrammarMasks) -> None:
        self._rows = {}
        self._after_drafts = {}
        for row, slot in enumerate(payload.slots):
            if slot in self._rows:
                self._after_drafts.setdefault(slot, []).append(row)
            else:
                self._rows[slot] = row
        self._masks = payload.masks

    def take_begun(self, slot: int) -> bool:
        """Whether a slot began with a form in the step that was told last. Said once."""
        if slot not in self._began:
            return False
        self._began.discard(slot)
        return True

    def masks(self, rows: SampledRows) -> RowMasks:
        """What these [R] rows may sample."""
        found = [ANY_TOKEN if row is None else row for row in self._of_rows(rows)]
        return RowMasks(self._masks, np.array(found, np.int32))

    def refuse(self, logits: Tensor, sampled: SampledRows) -> None:
        """Set what may not come in [K, V] logits of these [K] rows to minus infinity."""
        rows = self._of_rows(sampled)
        masked = [place for place, row in enumerate(rows) if row is not None]
        if not masked:
            return
        words = self._masks
        if rows != list(range(len(words))):
            # In the order of the logits, so that one pass needs no list of rows.
            words = np.full((len(rows), words.shape[1]), _ANYTHING, np.int32)
            words[masked] = self._masks[[row for row in rows if row is not None]]
        ops.mask_(logits, self._on_device(words))

    def _of_rows(self, rows: SampledRows) -> list[int | None]:
        """[K] the mask of each row; None where there is none."""
        if not self._after_drafts:
            return [self._rows.get(slot) for slot in rows.slots.tolist()]
        # Drafts are verified where the tokens before them are known: the first row of a slot is the next token's.
        places = rows.positions - self._states.num_tokens[rows.slots]
        return [
            self._rows.get(slot) if place == 0 else self._after_drafts[slot][place - 1] if slot in self._rows else None
            for slot, place in zip(rows.slots.tolist(), places.tolist(), strict=True)
        ]

    def _on_device(self, words: Int32Array) -> Tensor:
        found = torch.from_numpy(words)
        if self._device.type != "cuda":
            return found
        # Tensor.pin_memory() would copy with a thread for each core, which go on spinning for milliseconds.
        staged = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        staged.numpy()[:] = words
        return staged.to(self._device, non_blocking=True)
