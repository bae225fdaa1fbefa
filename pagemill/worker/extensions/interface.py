"""`WorkerExtension`: does what the engine's half of a step extension says. Knows no other extension."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill.messages.pending import Pending
from pagemill.messages.step import Int32Array
from pagemill.worker.batch.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What an extension is built with."""

    states: RequestStates
    """By slot, on the host; read only. Where steps run ahead, the last tokens of a slot may not be there yet."""
    kv_tensors: Sequence[Tensor]
    """Each [num_blocks * page_bytes] uint8 on the device: the KV cache, block after block."""
    num_blocks: int
    vocab_size: int
    device: torch.device


class WorkerExtension(ABC):
    """One per worker. Every rank is told the same, in the same order; what one raises ends the worker.

    A logits processor finds it under its name in `SamplerContext.extensions`: what `begin` was told last is of the step
    that the processor changes logits for.
    """

    def __init__(self, context: WorkerContext) -> None:  # noqa: B027 - for those that need nothing of it
        """`context` lives as long as the worker has a KV cache."""

    @abstractmethod
    def begin(self, payload: Any) -> None:
        """What the engine's half says to the next step: after the slots are free that the step releases, before its new
        requests take theirs, and before anything of it is computed. Not called for a step to which it says nothing.
        What is queued here on a device must not wait for it."""

    def begin_sampling(self, payload: Any) -> None:
        """What the engine's half says with the call that samples the step, before anything of it is sampled; the step
        may be computed already. Only for an extension whose line names a type of it, and not called for a step to which
        it says nothing. What is queued here on a device must not wait for it."""
        raise TypeError(f"{type(self).__name__} expects nothing when a step is sampled")

    def answer(self, slots: Int32Array) -> Pending[Any] | None:
        """What the engine's half gets with the tokens of the step that was sampled, or queued, just now; None:
        nothing. `slots`: the [L] slots that sampled. Called on every rank, for an extension whose line names a type of
        answer; the answer of the rank that returns the tokens is sent."""
        return None
