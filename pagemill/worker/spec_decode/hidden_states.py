"""`HiddenStates`: what the model computes of a step's tokens beside their logits, for a proposer that reads it.

Knows rows, not who reads them or what runs the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.input_batch import InputBatch

Given = Tensor | tuple[Tensor, tuple[Tensor, ...]]
"""[T, E] from a network, and what it keeps, [T, E] each."""


@dataclass(frozen=True, slots=True)
class WantedHidden:
    """What a proposer reads. Everything costs memory traffic; `final` also that the last layer runs on all tokens of a
    prompt."""

    sampled: bool = False
    """Behind the last norm, of the rows that are sampled from."""
    final: bool = False
    """The same of all rows."""
    layers: tuple[int, ...] = ()
    """What these layers read, of all rows; the number of layers stands for what the last one gives."""

    @property
    def only_sampled(self) -> bool:
        """Whether rows that are not sampled from are not read."""
        return not self.final and not self.layers


class HiddenStates:
    """Those of the step that ran last. On a device they lie where they always do: what reads them may be captured.

    A step's rows are as in its batch; behind them there may be padding."""

    def __init__(
        self, wanted: WantedHidden, model: CausalLM, room: tuple[int, int] | None, device: torch.device
    ) -> None:
        """`room`: the most tokens and sampled rows of a step whose values are to have a fixed place; None: they have
        none. Raises ModelError for layers that the model does not have."""
        if wanted.layers:
            model.keep_hidden(wanted.layers)
        self.wanted = wanted
        self.batch: InputBatch | None = None
        """Whose they are."""
        self._size = model.hidden_size
        self._fixed = room is not None
        tokens, rows = room or (0, 0)

        def memory(count: int, width: int) -> Tensor:
            return torch.zeros((count, width * model.hidden_size), dtype=model.dtype, device=device)

        self.sampled = memory(rows if wanted.sampled else 0, 1)
        """[L, E]."""
        self.final = memory(tokens if wanted.final else 0, 1)
        """[T, E]."""
        self.layers = memory(tokens if wanted.layers else 0, len(wanted.layers))
        """[T, N * E], in the order of `WantedHidden.layers`."""

    @property
    def arriving(self) -> Sequence[int]:
        """Layers whose states come with a step's inputs, ascending."""
        return ()

    def arrive(self, inputs: Tensor) -> Tensor:
        """What a stage is given -> what its first layer reads, or token ids."""
        return inputs

    def take(self, given: Given) -> Tensor:
        """What the network gives -> its result alone; what is wanted of the rest is here from now on."""
        result, kept = given if isinstance(given, tuple) else (given, ())
        if self.wanted.final:
            self.final = self._placed(self.final, result)
        if not self._fixed:
            if kept:
                self.layers = torch.cat(kept, dim=-1)
            return result
        for index, values in enumerate(kept):
            start = index * self._size
            self.layers[: len(values), start : start + self._size].copy_(values)
        return result

    def take_sampled(self, rows: Tensor) -> Tensor:
        """The rows of the result from which logits are computed, [L, E]."""
        if self.wanted.sampled:
            self.sampled = self._placed(self.sampled, rows)
        return rows

    def _placed(self, memory: Tensor, values: Tensor) -> Tensor:
        if not self._fixed:
            return values
        memory[: len(values)].copy_(values)
        return memory


def sampled_rows(hidden: HiddenStates | None, given: Given, rows: Tensor | None = None) -> Tensor:
    """[L, E], from which logits are computed, of what a network gives: all its rows, or these [L]. `hidden`: where
    somebody reads it."""
    if hidden is None:
        result: Tensor = given  # type: ignore[assignment]  # a network keeps something only where somebody reads it
        return result if rows is None else result.index_select(0, rows)
    result = hidden.take(given)
    return hidden.take_sampled(result if rows is None else result.index_select(0, rows))
