"""`between`: everything between two attentions as one kernel, where there is one for the layer. Imports no compiler."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.gpu_facts import is_hopper, num_processors
from pagemill.model.kernels.packed import Packed

PROGRAMS = 128
"""Each on a multiprocessor of its own: they wait for each other."""
MAX_ROWS = 8
HIDDEN = 4096
_INPUTS = 4096
"""Inputs that a program multiplies at a time, for 16 outputs."""
_OUTPUTS = 16 * PROGRAMS
_MOST_GATES = 8
_MOST_QKV = 4
"""Times 16 outputs: of a program, in shared memory."""
GROUP = 128


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What lies between two attentions: the o projection, a norm, gate and up, silu(gate) * up, down, a norm, qkv."""

    o: Packed
    gate_up: Packed
    down: Packed
    qkv: Packed
    norm1: Tensor
    """[HIDDEN], before gate and up."""
    norm2: Tensor
    """[HIDDEN], before qkv."""
    eps: tuple[float, float]
    """Of the norms."""

    @property
    def linears(self) -> tuple[Packed, Packed, Packed, Packed]:
        """In the order in which they are multiplied."""
        return self.o, self.gate_up, self.down, self.qkv


def fits(weights: LayerWeights) -> bool:
    """Whether the kernel takes these weights, wherever they are."""
    mixed, inner, qkv = weights.o.num_inputs, weights.down.num_inputs, weights.qkv.num_outputs
    shapes = (HIDDEN, mixed), (2 * inner, HIDDEN), (HIDDEN, inner), (qkv, HIDDEN)
    plain = all(
        (one.num_outputs, one.num_inputs) == shape
        and (one.bits, one.group, one.offsets, one.halves) == (4, GROUP, None, False)
        for one, shape in zip(weights.linears, shapes, strict=True)
    )
    gates, outputs = divmod(inner, _OUTPUTS)
    parts, rest = divmod(qkv, _OUTPUTS)
    return plain and mixed % _INPUTS == outputs == rest == 0 and gates <= _MOST_GATES and parts <= _MOST_QKV


class PackedLayer:
    """The kernel for one place in a model."""

    def __init__(self, kernels: ModuleType, weights: LayerWeights) -> None:
        """`kernels`: the module triton/packed_layer.py, whose kernel this launches."""
        self._kernels = kernels
        self._num_outputs = weights.qkv.num_outputs
        self._prepared = kernels.prepare(weights)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether it computes these rows."""
        return 0 < len(x) <= MAX_ROWS and x.dtype == torch.bfloat16 and not torch.compiler.is_compiling()

    def run(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, MIXED] and [T, HIDDEN], rows side by side, -> qkv [T, QKV], and the residual's sum, in its place."""
        qkv = attended.new_empty(len(attended), self._num_outputs)
        self._kernels.packed_layer(qkv, attended, residual, self._prepared)
        return qkv, residual


def between(weights: LayerWeights) -> PackedLayer | None:
    """None where there is no kernel for these weights where they are."""
    device = weights.o.words.device
    if not fits(weights) or not is_hopper(device) or num_processors(device) < PROGRAMS:
        return None
    kernels = triton_kernels("packed_layer")
    return None if kernels is None else PackedLayer(kernels, weights)
