"""`DeviceWeights`: quantized weights of checkpoints on a GPU. Knows no file format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels import eight_bits, moe, packed
from pagemill.model.kernels.packed import Packed
from pagemill.model.loading.packed_weight import Inputs, PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device_experts import DeviceExperts, Ways
from pagemill.model.quantization.eight_bits import EightBitsWeight
from pagemill.model.quantization.fp8 import MIN_CAPABILITY, Fp8Weight
from pagemill.model.quantization.interface import ExpertSizes, ExpertWeights, LinearWeight, QuantMethod
from pagemill.model.quantization.once import Once
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.parts import parts_note, stacked_with_note
from pagemill.model.quantization.unquantized import Unquantized

NIBBLE_ZEROS = 100
BYTE_ZEROS = 128
"""The largest zero points, either way, with which differences are exact in bfloat16."""


class GroupedWeight(LinearWeight):
    """[N, K] integers of 4 or 8 bits with scales for groups of inputs, the gated activation included."""

    gives_rows = True

    def __init__(self, weight: Packed, dtype: torch.dtype, gate: str | None) -> None:
        """`dtype`: of `rows`."""
        self.packed: Packed = weight
        self.gate = gate
        self._dtype = dtype

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            from pagemill.model.kernels import packed_op  # deferred: registering takes time, and only compilers ask

            return packed_op.traced_linear(x, self.packed, bias, self.gate)
        return packed.linear(x, self.packed, bias, self.gate)

    def logits(self, x: Tensor) -> Tensor:
        return packed.linear(x, self.packed, out_dtype=torch.float32)

    def rows(self, indices: Tensor) -> Tensor:
        return packed.rows(self.packed, indices, self._dtype)


class MadeWeight(GroupedWeight):
    """[N, K] integers of 8 bits that were floats; an embedding that shares them keeps the floats, which are exact and
    looked up by one kernel."""

    gives_rows = False


class DeviceWeights(QuantMethod):
    """What there are kernels for is multiplied as it is stored: integers of up to 8 bits in groups of 32 inputs or a
    multiple, with floats as inputs; integers of 8 bits with a scale per output, with integers as inputs where there are
    many rows; and 8-bit floats with a scale per output or for each 128 inputs. Everything else is dequantized, and a
    line says so."""

    takes_packed = True

    def __init__(self, dtype: torch.dtype, *, quantize_floats: bool = False) -> None:
        """`dtype`: the model's. `quantize_floats`: floats become integers of 8 bits, but for those of experts."""
        self._dtype = dtype
        self._quantize_floats = quantize_floats
        self._floats = Unquantized()
        self._note = Once("weights of %s are dequantized to %s: this device has no kernel for them")
        self._width_note = Once("layers of %d inputs stay floats: --quantization is of multiples of %d inputs")
        self._parts_note = parts_note()

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        if isinstance(weight, PackedWeight):
            if _multiplies_floats(weight):
                return Fp8Weight(weight.values.contiguous(), weight.scales.float().flatten().contiguous(), gate)
            eight = _eight_bits(weight)
            if eight is not None:
                return EightBitsWeight(eight, gate)
            grouped = _grouped(weight, self._dtype, gate)
            if grouped is not None:
                return grouped
            self._tell(weight)
            weight = weight.dequantized(self._dtype)
        elif self._quantize_floats:
            made = packed.eight_bits(floats(weight, self._dtype))
            if made is not None:
                return MadeWeight(made, self._dtype, gate)
            self._width_note.warn(weight.shape[1], packed.PLANE)
        return self._floats.prepare(weight, gate)

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        return self.prepare(stacked_with_note(parts, dtype, self._parts_note), gate)

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return DeviceExperts(sizes, dtype, moe.form_of(gate), self.expert_ways)

    @property
    def expert_ways(self) -> Ways:
        """How `DeviceExperts` are to hold weights."""
        return _packed, multiplies_eight_bits, self._tell

    def _tell(self, weight: PackedWeight) -> None:
        self._note.warn(weight.description, str(self._dtype)[6:])


def _multiplies_floats(weight: PackedWeight) -> bool:
    return weight.scales.shape[1] == 1 and multiplies_eight_bits(weight)


def multiplies_eight_bits(weight: PackedWeight) -> bool:
    """Whether a weight on a GPU is of 8-bit floats, and the GPU has them."""
    if not weight.is_float or weight.zeros is not None:
        return False
    return torch.cuda.get_device_capability(weight.device) >= MIN_CAPABILITY


def _eight_bits(weight: PackedWeight) -> eight_bits.EightBits | None:
    """The weight for the kernels that multiply rows of 8 bits, too; None where it is none for them."""
    if weight.zeros is not None:
        return None
    if weight.is_float:
        blocks = weight.group_size == eight_bits.BLOCK
        if not blocks or torch.cuda.get_device_capability(weight.device) < MIN_CAPABILITY:
            return None
        return eight_bits.blocks_of_floats(weight.values, weight.scales)
    if weight.bits != 8 or weight.inputs is not Inputs.INT8 or weight.scales.shape[1] != 1:
        return None
    return eight_bits.integers(weight.values, weight.scales)


def _grouped(weight: PackedWeight, dtype: torch.dtype, gate: str | None) -> LinearWeight | None:
    """The weight for the kernels of grouped integers; None where it is none for them."""
    if weight.is_float or weight.levels is not None:
        return None
    ordered, order = weight.sorted_inputs()
    held = _packed(ordered)
    if held is None:
        return None
    made = GroupedWeight(held, dtype, gate)
    return made if order is None else OrderedWeight(made, order)


def _packed(weight: PackedWeight) -> Packed | None:
    """The weight, whose inputs are in order, as integers of 4 or 8 bits or as 4-bit floats; None where it cannot be."""
    if weight.is_float or weight.levels is not None:
        return None
    size = weight.group_size
    zeros = weight.zeros
    halves = weight.halves
    bits = 4 if weight.bits <= 4 or halves else 8
    if size is None or packed.held_group(size, weight.shape[1], bits) is None:
        return None
    if zeros is not None:
        whole = zeros.float()
        if not bool(((whole == whole.round()) & (whole.abs() <= (NIBBLE_ZEROS if bits == 4 else BYTE_ZEROS))).all()):
            return None
    return packed.pack(weight.values, weight.scales, zeros, size, bits, halves=halves)
