"""`DeviceExperts`: the experts of quantized checkpoints on a GPU, as they are stored where there are kernels for that.
Knows no file format.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill.model.kernels import moe, packed_experts
from pagemill.model.kernels.moe import FACTOR_INPUTS, ExpertForm
from pagemill.model.kernels.packed import TILE, Packed
from pagemill.model.kernels.packed_experts import PackedExperts
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights

Pack = Callable[[PackedWeight], Packed | None]
"""A weight for the kernels of grouped integers and 4-bit floats; None where it is none for them."""
Eight = Callable[[PackedWeight], bool]
"""Whether a weight is of 8-bit floats, and the device multiplies those."""
Note = Callable[[PackedWeight], None]
"""Tell that a weight is dequantized."""

Ways = tuple[Pack, Eight, Note]


class _Stack:
    """One weight [out, in] of each expert, in the form of the first that comes; as floats where others have another."""

    def __init__(self, num_experts: int, dtype: torch.dtype, ways: Ways, inner: int | None = None) -> None:
        """`inner`: of gates and ups, which are packed with padding, how many each are."""
        self._num_experts = num_experts
        self._inner = inner
        self._dtype = dtype
        self._pack, self._is_eight, self._note = ways
        self.packed: PackedExperts | None = None
        self.plain: Tensor | None = None
        """[N, out, in] floats of the model's type, or of 8 bits."""
        self.factors: Tensor | None = None
        """Of floats of 8 bits, float32: [N, out], or [N, G, out] with one for each `FACTOR_INPUTS` inputs."""

    @property
    def form(self) -> str:
        """Two of one form can be multiplied together."""
        if self.packed is not None:
            return "packed"
        return "floats" if self.factors is None else "floats of 8 bits"

    def put(self, index: int, weight: Tensor | QuantizedTensor) -> None:
        """Take the weight of one expert."""
        packed = self._packed(weight) if isinstance(weight, PackedWeight) else None
        if packed is not None and self.plain is None:
            if self.packed is None:
                self.packed = packed_experts.room(self._num_experts, packed, self._inner)
            if self.packed.takes(packed):
                self.packed.put(index, packed)
                return
        elif isinstance(weight, PackedWeight) and self._is_eight(weight) and self.packed is None:
            factors = _factors(weight)
            if self.plain is None and factors is not None:
                self.plain = self._room(weight, weight.values.dtype)
                self.factors = factors.new_empty(self._num_experts, *factors.shape)
            held = self.factors
            if self.plain is not None and held is not None and factors is not None and held[0].shape == factors.shape:
                self.plain[index].copy_(weight.values)
                held[index].copy_(factors)
                return
        self.dequantize()
        if self.plain is None:
            self.plain = self._room(weight, self._dtype)
        if isinstance(weight, PackedWeight):
            self._note(weight)
        self.plain[index].copy_(floats(weight, self._dtype))

    def dequantize(self) -> None:
        """What is held, as floats of the model's type."""
        if self.packed is not None:
            self.plain = self.packed.floats(self._dtype)
            self.packed = None
        elif self.plain is not None and self.factors is not None:
            eight, self.plain = self.plain, torch.empty(self.plain.shape, dtype=self._dtype, device=self.plain.device)
            for index, factors in enumerate(self.factors):
                self.plain[index] = eight[index].float() * moe.spread(factors, eight[index])
            self.factors = None

    def _packed(self, weight: PackedWeight) -> Packed | None:
        return self._pack(weight if self._inner is None else weight.with_rows(packed_experts.padded_halves))

    def _room(self, like: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._num_experts, *like.shape, dtype=dtype, device=like.device)


def _factors(weight: PackedWeight) -> Tensor | None:
    """[out] or [G, out] float32; None of a weight whose groups have another size."""
    if weight.scales.shape[1] == 1:
        return weight.scales.float().flatten()
    return weight.scales.float().t().contiguous() if weight.group_size == FACTOR_INPUTS else None


class DeviceExperts(ExpertWeights):
    """The experts of a layer, in three forms: packed, floats of 8 bits with factors, or the model's floats."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, form: ExpertForm, ways: Ways) -> None:
        # Each half of the first layer begins with a tile.
        padded = sizes.inner_size if sizes.inner_size % TILE else None
        self.gate_up = _Stack(sizes.num_experts, dtype, ways, padded)
        self.down = _Stack(sizes.num_experts, dtype, ways)
        self.form: ExpertForm = form

    def put_gate_up(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        self.gate_up.put(expert, weight)

    def put_down(self, expert: int, weight: Tensor | QuantizedTensor) -> None:
        self.down.put(expert, weight)

    def apply(self, x: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
        first_layer, second = self.gate_up, self.down
        # Once: the first step is before any graph is captured. Its kernels may be compiled only, so this takes none.
        if first_layer.form != second.form:
            first_layer.dequantize()
            second.dequantize()
        if first_layer.packed is not None and second.packed is not None:
            return packed_experts.experts(x, first_layer.packed, second.packed, chosen, weights, first, self.form)
        if first_layer.plain is None or second.plain is None:
            raise RuntimeError("no expert of the layer has its weights")
        scales = None
        if first_layer.factors is not None and second.factors is not None:
            scales = first_layer.factors, second.factors
        return moe.experts(x, first_layer.plain, second.plain, chosen, weights, first, self.form, scales)
