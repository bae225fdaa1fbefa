"""`LogitsProcessor`: changes logits of the requests that ask for it; state is kept by slot, so nothing moves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.row_masks import RowMasks
from pagemill.worker.sampling.context import SamplerContext


class LogitsProcessor(ABC):
    """One kind of change to the logits. A slot takes part from `add` (returning True) until `remove`, or until
    `take_done` names it; rows of other slots are never seen, and are sampled as if there were no processor.

    What `add`, `apply` or `take_done` raises ends the requests that they were called for, with an error, and no others;
    what `remove` raises is logged."""

    reads_tokens: ClassVar[bool] = False
    """Whether `context.history` is read: it is kept for the slots that take part."""

    arguments: ClassVar[Sequence[str]] = ()
    """Names in a request's `extra_args` (over HTTP `vllm_xargs`) that are read; a name that no processor reads is
    refused."""

    def __init__(self, context: SamplerContext) -> None:
        self.context = context

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Raise ValueError, which says what is allowed, for a request with values that make no sense. Called in the
        front end for requests with `extra_args`, before the engine sees them."""
        return

    @abstractmethod
    def add(self, new: NewRequest) -> bool:
        """Set the slot's state from its request; False when the request does not ask for this processor."""

    def remove(self, slot: int) -> None:  # noqa: B027 - for those that keep nothing
        """Forget a slot; slots that never took part are ignored."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Change [K, V] float32 logits in place; row i belongs to rows.slots[i], which takes part. A slot that verifies
        drafts has several rows, one after the other, of which only the first is sure to be kept. What is queued here on
        a device must not wait for it."""

    def take_done(self) -> Sequence[int]:
        """The slots that asked for nothing more in the last `apply`, each once; they are forgotten. A processor that
        names them lets these rows be sampled without it again, which is faster; none needs to."""
        return ()


class MaskingProcessor(LogitsProcessor):
    """One that refuses tokens and changes nothing else: a row of which no other processor wants anything may be sampled
    by its mask, without `apply`. Of several such processors only the first is asked."""

    @abstractmethod
    def masks(self, rows: SampledRows) -> RowMasks:
        """The tokens of [R] rows, of slots of which some may take no part, that `apply` leaves as they are. On the
        host."""
