"""`SamplerContext`: what a logits processor is built with. Knows slots, not requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.extensions.interface import WorkerExtension
from pagemill.worker.sampling.history import TokenHistory


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """What processors may look at. They read it and change nothing in it."""

    states: RequestStates
    """By slot, on the host. Where steps run ahead, the last tokens of a slot may not be there yet; their number is."""
    vocab_size: int
    """V, the width of the logits."""
    device: torch.device
    """Where the logits are, and where a processor keeps its tensors."""
    history: TokenHistory
    """The tokens of slots, on the device; for processors with `reads_tokens`."""
    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)
    """Step extensions by name: what the engine says to a step, for the processor that belongs to it."""
