"""Weights of 8 or 4 bits, multiplied as such by the native kernels, with inputs of 8 bits. Knows no file format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.linear_int import BLOCK, Q8_0, WIDE, pack_blocks, pack_codes, pack_words, quantize_q8
from pagemill.model.kernels.weight_memory import WeightMemory
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.codes import codes_of
from pagemill.model.loading.nibble_weight import StoredIntegers, unpacked
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor, floats
from pagemill.model.quantization.device import DeviceWeights
from pagemill.model.quantization.device_made import on_device
from pagemill.model.quantization.experts import SeparateExperts
from pagemill.model.quantization.interface import (
    ExpertSizes,
    ExpertWeights,
    LinearWeight,
    Quantization,
    QuantMethod,
    QuantRequest,
    Uniform,
)
from pagemill.model.quantization.once import Once
from pagemill.model.quantization.ordered import OrderedWeight
from pagemill.model.quantization.panels import GATES, PanelWeight
from pagemill.model.quantization.parts import parts_note, stacked_with_note
from pagemill.model.quantization.unquantized import Unquantized


class Integers(QuantMethod):
    """Quantized files in their own precision; other weights as they are or, if `quantize_floats`, in 8 bits. Integers
    are multiplied with inputs of 8 bits; with `wide_inputs`, those that a model is the most sensitive to with inputs of
    16: floats that have become integers, the output head mostly, and what makes queries, keys and values."""

    takes_blocks = True
    takes_packed = True

    def __init__(self, *, quantize_floats: bool, wide_inputs: bool = False) -> None:
        self._quantize_floats = quantize_floats
        self._wide_inputs = wide_inputs
        self._memory = WeightMemory()
        self._floats = Unquantized(self._memory)
        self._note = Once(
            "weights of %s are dequantized to bfloat16: integers are multiplied as they are where 32 neighbours "
            "share a scale that 16-bit floats can hold, and 8-bit ones fit a byte without their zero points"
        )
        self._parts_note = parts_note()
        self._width_note = Once("layers of %d inputs stay floats: --quantization is of blocks of %d inputs")

    def prepare(self, weight: Tensor | QuantizedTensor, gate: str | None = None) -> LinearWeight:
        return self._prepared(weight, gate, wide=False)

    def prepare_qkv(self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype) -> LinearWeight:
        if not self._wide_inputs:
            return self.prepare_stacked(parts, dtype)
        made = self._of_codes(parts, None, wide=True)
        return made or self._prepared(stacked_with_note(unpacked(parts), dtype, self._parts_note), None, wide=True)

    def _prepared(self, weight: Tensor | QuantizedTensor, gate: str | None, *, wide: bool) -> LinearWeight:
        if isinstance(weight, BlockTensor):
            return self._panels(weight, gate, wide)
        if isinstance(weight, PackedWeight | StoredIntegers):
            made = self._of_codes([weight], gate, wide=wide)
            if made is not None:
                return made
            plain = weight.unpacked() if isinstance(weight, StoredIntegers) else weight
            ordered, order = plain.sorted_inputs()
            blocks = ordered.as_blocks()
            if blocks is None:
                self._note.warn(plain.description)
                return self._floats.prepare(plain.dequantized(torch.bfloat16), gate)
            panels = self._panels(blocks, gate, wide)
            return panels if order is None else OrderedWeight(panels, order)
        values = floats(weight, torch.bfloat16)
        width = values.shape[1]
        if self._quantize_floats and width % BLOCK:
            self._width_note.warn(width, BLOCK)
        if not self._quantize_floats or width % BLOCK:
            return self._floats.prepare(values, gate)
        return self._panels(BlockTensor(Q8_0, quantize_q8(values)), gate, self._wide_inputs)

    def prepare_stacked(
        self, parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, gate: str | None = None
    ) -> LinearWeight:
        """Panels are made of the parts where they are: a stack of them would be one copy more."""
        blocks = [part for part in parts if isinstance(part, BlockTensor)]
        if len(blocks) == len(parts) and all(part.kind == blocks[0].kind for part in blocks):
            rows = [part.blocks for part in blocks]
            return PanelWeight(pack_blocks(blocks[0].kind, rows, gate=GATES[gate], memory=self._memory))
        if not self._quantize_floats and all(isinstance(part, Tensor) for part in parts):
            return self._floats.prepare_stacked(parts, dtype, gate)
        made = self._of_codes(parts, gate, wide=False)
        return made or self.prepare(stacked_with_note(unpacked(parts), dtype, self._parts_note), gate)

    def _of_codes(
        self, parts: Sequence[Tensor | QuantizedTensor], gate: str | None, *, wide: bool
    ) -> LinearWeight | None:
        """Panels made of what files hold, where it is; None where it is not as panels have it."""
        found = [codes for codes in map(codes_of, parts) if codes is not None]
        if len(found) < len(parts) or not all(codes.goes_with(found[0]) for codes in found):
            return None
        kind = found[0].kind
        kind = WIDE.get(kind.name, kind) if wide else kind
        words, groups, order = found[0].words, found[0].groups, found[0].order
        codes = [one.codes for one in found]
        limits = [one.limits for one in found]
        if words is None:
            packed = pack_codes(kind, codes, limits, groups, order, GATES[gate], self._memory)
        else:
            packed = pack_words(kind, words, codes, limits, groups, order, GATES[gate], self._memory)
        if packed is None:
            return None
        return PanelWeight(packed) if order is None else OrderedWeight(PanelWeight(packed), order)

    def _panels(self, weight: BlockTensor, gate: str | None, wide: bool) -> LinearWeight:
        kind = WIDE.get(weight.kind.name, weight.kind) if wide else weight.kind
        return PanelWeight(pack_blocks(kind, weight.blocks, gate=GATES[gate], memory=self._memory))

    def experts(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, gate: str) -> ExpertWeights:
        return SeparateExperts(self, sizes, gate)


def runs(request: QuantRequest) -> bool:
    """Whether the kernels do."""
    return request.device == "cpu" and request.dtype == torch.bfloat16 and packs_natively()


def as_stored(request: QuantRequest) -> QuantMethod:
    """The method that computes what checkpoints store: in their precision where there are kernels for it and nothing
    else is asked for; as floats elsewhere."""
    if request.dequantize:
        return Unquantized()
    if runs(request):
        return Integers(quantize_floats=request.quantize_floats, wide_inputs=bool(request.config))
    on_gpu = request.device.startswith("cuda") and request.config
    return DeviceWeights(request.dtype, quantize_floats=request.quantize_floats) if on_gpu else Unquantized()


def make(request: QuantRequest) -> Quantization:
    """8-bit integers of float weights, too. Raises ConfigError where there are no kernels for them."""
    if request.device.startswith("cuda"):
        return on_device(request.dtype)
    require(request)
    return Uniform(Integers(quantize_floats=True))


def require_for_floats(request: QuantRequest) -> None:
    """Raises ConfigError where floats of a quantized checkpoint cannot be integers of 8 bits."""
    if not request.device.startswith("cuda"):
        require(request)


def require(request: QuantRequest, wanted: str = "int8") -> None:
    """Raises ConfigError where the kernels cannot run."""
    if not runs(request):
        raise ConfigError(
            f"quantization={wanted} needs the native CPU kernels and dtype=bfloat16; here "
            f"dtype={str(request.dtype)[6:]}, device {request.device}; use --dtype bfloat16, or leave out "
            "--quantization"
        )
