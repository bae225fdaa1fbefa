"""`PerSlotProcessor`: a logits processor that keeps one thing for each slot that takes part. Does not know what."""

from abc import abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.processors.interface import LogitsProcessor

State = TypeVar("State")


class PerSlotProcessor(LogitsProcessor, Generic[State]):
    """`states` has the slots that take part."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self.states: dict[int, State] = {}

    @abstractmethod
    def state_of(self, new: NewRequest, params: SamplingParams) -> State | None:
        """What is kept for a request; None when it does not ask for this processor."""

    def add(self, new: NewRequest) -> bool:
        self.remove(new.slot)
        state = self.state_of(new, new.params) if isinstance(new.params, SamplingParams) else None
        if state is not None:
            self.states[new.slot] = state
        return state is not None

    def remove(self, slot: int) -> None:
        self.states.pop(slot, None)

    def sent(self, tensor: Tensor) -> Tensor:
        """A tensor, where the logits are; nothing waits for it."""
        return tensor.to(self.context.device, non_blocking=True)
