"""`StageStates`: hidden states for a proposer on the last pipeline stage, of layers on any stage.

Those of earlier stages come with what a stage is given, and go on with what it gives. Knows rows, not who reads them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.spec_decode.hidden_states import Given, HiddenStates, WantedHidden


class StageStates(HiddenStates):
    """Those of one stage, where they have no fixed place."""

    def __init__(self, wanted: WantedHidden, model: CausalLM, device: torch.device) -> None:
        """Raises ModelError for layers that the model does not have."""
        super().__init__(wanted, model, None, device)
        self._is_last = model.is_last
        self._here = model.network.layer_inputs.layers
        first = min(model.network.layer_inputs.known, default=0)
        self._before = sorted({index for index in wanted.layers if index < first})
        self._arrived: dict[int, Tensor] = {}

    @property
    def arriving(self) -> Sequence[int]:
        return self._before

    def arrive(self, inputs: Tensor) -> Tensor:
        if not self._before:
            return inputs
        self._arrived = dict(zip(self._before, inputs[1:], strict=True))
        return inputs[0]

    def take(self, given: Given) -> Tensor:
        """On a stage that is not the last, the result with all that goes on beside it: [1 + N, T, E]."""
        result, kept = given if isinstance(given, tuple) else (given, ())
        states = self._arrived | dict(zip(self._here, kept, strict=True))
        self._arrived = {}
        if not self._is_last:
            return torch.stack((result, *(states[index] for index in sorted(states)))) if states else result
        return super().take((result, tuple(states[index] for index in self.wanted.layers)))
