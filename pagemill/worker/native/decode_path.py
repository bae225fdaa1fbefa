"""`NativeDecode`: the one place that decides whether a decode step runs as one native call, and says why not.

`native_decode` decides what holds for all steps of a runner, `accepts` what holds for one. Each reason is logged once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.log import get_logger
from pagemill.messages.step import Int32Array
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.network.native_plan import NotPlannable
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.batch.row_masks import RowMasks
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.native.decode_step import MAX_ROWS, MAX_SAMPLED, Acceptance, Decoded, DecodeStep

logger = get_logger(__name__)

NOT_A_DECODE_STEP = "it computes tokens of prompts"
_REASONS = {
    Acceptance.NOT_A_DECODE_STEP: NOT_A_DECODE_STEP,
    Acceptance.UNKNOWN_TOKEN: "it has a token without an embedding",
    Acceptance.TOO_MANY_ROWS: f"it has more than {MAX_ROWS} requests, or {MAX_SAMPLED} with their drafts",
    Acceptance.CHANGED_DRAFTS: "it verifies drafts of a request whose logits are changed or told of",
}


class NativeDecode(ABC):
    """Decode steps as one native call each, tokens to tokens or, where drafts are compared elsewhere, to logits."""

    possible = True
    """Whether any step is accepted."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    @abstractmethod
    def accepts(self, slots: Int32Array, num_tokens: Int32Array) -> str | None:
        """Why the step of these [R] slots, which compute so many tokens each, must run in another way; None: `run`
        can do it. Nothing has happened yet."""

    @property
    @abstractmethod
    def computes(self) -> bool:
        """Whether `compute` can do the step that `accepts` was asked about last, be it accepted or not."""

    @property
    @abstractmethod
    def samples_all(self) -> bool:
        """Of such a step; see `DecodeStep.samples_all`."""

    @abstractmethod
    def run(self) -> Decoded:
        """The step that was accepted last; see `DecodeStep.run`."""

    @abstractmethod
    def compute(self) -> Tensor:
        """The logits of a step that is sampled elsewhere; see `DecodeStep.compute`."""

    @abstractmethod
    def store_hidden(self) -> None:
        """Let `hidden` give the result of the layers from now on."""

    @abstractmethod
    def hidden(self, num_tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of the last step; see `DecodeStep.hidden`."""

    @abstractmethod
    def logits(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Of these [L] ascending ones of the slots of the last step; see `DecodeStep.logits`."""

    @abstractmethod
    def choose(self, masks: RowMasks, tokens: Int32Array) -> None:
        """Sample rows of the last step that `run` left to others; see `DecodeStep.choose`."""

    def report(self, reason: str) -> None:
        """Log why a step was not accepted, the first time. That prompts are not decoded is expected."""
        if reason not in self._logged:
            self._logged.add(reason)
            if reason != NOT_A_DECODE_STEP:
                logger.info("a decode step does not run as one native call: %s", reason)


class NativeSteps(NativeDecode):
    """Decode steps that a `DecodeStep` runs as one native call."""

    def __init__(self, step: DecodeStep) -> None:
        super().__init__()
        self._step = step
        self._computes = False

    def accepts(self, slots: Int32Array, num_tokens: Int32Array) -> str | None:
        outcome = self._step.accepts(slots, num_tokens)
        self._computes = outcome in (Acceptance.ACCEPTED, Acceptance.CHANGED_DRAFTS)
        return None if outcome is Acceptance.ACCEPTED else _REASONS[outcome]

    @property
    def computes(self) -> bool:
        return self._computes

    @property
    def samples_all(self) -> bool:
        return self._step.samples_all

    def run(self) -> Decoded:
        return self._step.run()

    def compute(self) -> Tensor:
        return self._step.compute()

    def store_hidden(self) -> None:
        self._step.store_hidden()

    def hidden(self, num_tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._step.hidden(num_tokens)

    def logits(self, rows: npt.NDArray[np.int64]) -> Tensor:
        return self._step.logits(rows)

    def choose(self, masks: RowMasks, tokens: Int32Array) -> None:
        self._step.choose(masks, tokens)


class NoNativeDecode(NativeDecode):
    """Accepts no step, always for the same reason."""

    possible = False

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def accepts(self, slots: Int32Array, num_tokens: Int32Array) -> str | None:
        return self._reason

    @property
    def computes(self) -> bool:
        return False

    @property
    def samples_all(self) -> bool:
        return False

    def run(self) -> Decoded:
        raise RuntimeError("no step was accepted")

    def compute(self) -> Tensor:
        raise RuntimeError("no step was accepted")

    def store_hidden(self) -> None:
        """Nothing: there are no native steps whose hidden states could be kept."""

    def hidden(self, num_tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise RuntimeError("no step was accepted")

    def logits(self, rows: npt.NDArray[np.int64]) -> Tensor:
        raise RuntimeError("no step was accepted")

    def choose(self, masks: RowMasks, tokens: Int32Array) -> None:
        raise RuntimeError("no step was accepted")


def native_decode(
    model: CausalLM,
    network: Callable[..., Tensor],
    states: RequestStates,
    groups: AttentionGroups,
    device: torch.device,
) -> NativeDecode:
    """For a model whose forward pass is `network`, compiled or not, on a device."""
    if device.type != "cpu":
        return NoNativeDecode(f"the model is on {device.type}")
    if network is not model:
        return NoNativeDecode("the model is compiled")
    if not isinstance(model, CausalLM):
        return NoNativeDecode(f"{type(model).__name__} has no native form")
    try:
        native = model.native_network()
    except NotPlannable as reason:
        return NoNativeDecode(str(reason))
    return NativeSteps(DecodeStep(native, states.arrays(), groups.slot_tables()))
