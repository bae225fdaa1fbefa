"""Logits to tokens: processors in order, temperature, min-p, top-k and top-p, then one draw per row.

Knows no requests, only slots. The draw is by inverse distribution: one uniform number per (seed, position).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.catalog.logits import LOGITS
from pagemill.messages.step import NewRequest
from pagemill.model.kernels import ops
from pagemill.model.kernels.reference import token_or_none
from pagemill.worker.batch.input_batch import InputBatch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.filters import min_p_, top_k_top_p_
from pagemill.worker.sampling.philox import uniform
from pagemill.worker.sampling.processors.interface import LogitsProcessor


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(self, states: RequestStates, processors: Sequence[LogitsProcessor] | None = None) -> None:
        self._states = states
        self._processors = [LOGITS.resolve(name)() for name in LOGITS] if processors is None else list(processors)
        self._processed: dict[int, int] = {}
        """Slot -> how many processors have something to do for it; at least one."""

    def add(self, new: NewRequest) -> None:
        """A request takes a slot."""
        wanted = sum([processor.add(new) for processor in self._processors])
        if wanted:
            self._processed[new.slot] = wanted
        else:
            self._processed.pop(new.slot, None)

    def remove(self, slot: int) -> None:
        """A slot is released."""
        if slot in self._processed:
            del self._processed[slot]
            for processor in self._processors:
                processor.remove(slot)

    @property
    def active(self) -> bool:
        """Whether any slot has a processor with something to do."""
        return bool(self._processed)

    def process(self, logits: Tensor, batch: InputBatch) -> None:
        """Change [L, V] float32 logits in place, as the slots' requests ask for."""
        for processor in self._processors:
            processor.apply(logits, batch)
            for slot in processor.take_done():
                self._processed[slot] -= 1
                if not self._processed[slot]:
                    del self._processed[slot]

    def sample(self, logits: Tensor, batch: InputBatch) -> npt.NDArray[np.int32]:
        """[L, V] float32 logits (changed in place) to [L] token ids; NO_TOKEN for rows that are no distribution."""
        if self._processed:
            self.process(logits, batch)
        greedy = self._states.greedy[batch.sampled_slots]
        if greedy.all():
            return ops.argmax(logits).numpy().astype(np.int32)
        tokens = np.empty(len(greedy), np.int32)
        if greedy.any():
            tokens[greedy] = ops.argmax(logits[torch.from_numpy(greedy)]).numpy()
        drawn = ~greedy
        rows = logits[torch.from_numpy(drawn)] if greedy.any() else logits
        tokens[drawn] = self._draw(rows, batch.sampled_slots[drawn], batch.sampled_positions[drawn])
        return tokens

    def _draw(
        self, logits: Tensor, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        states = self._states
        uniforms = torch.from_numpy(uniform(states.seed[slots], positions))
        if ops.samples_natively(logits):
            return self._draw_natively(logits, slots, uniforms)
        logits.div_(torch.from_numpy(states.temperature[slots]).unsqueeze(1))
        min_p, top_k, top_p = states.min_p[slots], states.top_k[slots], states.top_p[slots]
        if min_p.any():
            min_p_(logits, torch.from_numpy(min_p))
        if top_k.any() or (top_p < 1).any():
            top_k_top_p_(logits, torch.from_numpy(top_k.astype(np.int64)), torch.from_numpy(top_p))
        return _invert(logits, uniforms)

    def _draw_natively(self, logits: Tensor, slots: npt.NDArray[np.int32], uniforms: Tensor) -> npt.NDArray[np.int32]:
        states = self._states
        temperature, min_p, top_k, top_p = (
            torch.from_numpy(values[slots]) for values in (states.temperature, states.min_p, states.top_k, states.top_p)
        )
        tokens: npt.NDArray[np.int32] = ops.sample(logits, temperature, min_p, top_k, top_p, uniforms).numpy()
        return tokens


def _invert(logits: Tensor, uniforms: Tensor) -> npt.NDArray[np.int32]:
    """[L, V], [L] float64 -> [L]: the token at which the cumulative probability passes each uniform number; NO_TOKEN
    for rows that are no distribution."""
    cumulative = logits.softmax(-1).to(torch.float64).cumsum(-1)
    targets = (uniforms * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = token_or_none(logits, tokens.clamp_(max=logits.shape[1] - 1))
    return tokens.to(torch.int32).numpy()
