"""`LogitsProcessor`: changes logits of the requests that ask for it; state is kept by slot, so nothing moves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import InputBatch


class LogitsProcessor(ABC):
    """One kind of change to the logits. A slot takes part from `add` (returning True) until `remove`, or until
    `take_done` names it."""

    @abstractmethod
    def add(self, new: NewRequest) -> bool:
        """Set the slot's state from its request; False when the request does not ask for this processor."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """Forget a slot; slots that never took part are ignored."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: InputBatch) -> None:
        """Change [L, V] float32 logits in place; row i belongs to batch.sampled_slots[i]."""

    def take_done(self) -> Sequence[int]:
        """The slots that asked for nothing more in the last `apply`, each once; they are forgotten. A processor that
        names them lets the batch go back to steps without processors, which are faster; none needs to."""
        return ()
