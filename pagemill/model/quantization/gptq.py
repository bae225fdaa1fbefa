"""Checkpoints of GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs, with zero points, inputs in any order.

Knows no model. (Frantar et al., "GPTQ", 2022; the layout is AutoGPTQ's, which GPTQModel and AutoRound write too.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import Words
from pagemill.model.loading.few_rows import few_rows
from pagemill.model.loading.nibble_weight import WordWeight
from pagemill.model.loading.packed_weight import PackedWeight
from pagemill.model.loading.quantized_tensor import QuantizedTensor
from pagemill.model.loading.stored import Axis, StoredTensor, WeightPart
from pagemill.model.quantization.bit_packing import WORD, centred, first_read, unpack
from pagemill.model.quantization.fields import Fields
from pagemill.model.quantization.integers import as_stored
from pagemill.model.quantization.interface import Quantization, QuantMethod, QuantRequest, ShapeError
from pagemill.model.quantization.packed_method import PackedMethod, only_tensors
from pagemill.model.quantization.scale_grid import ScaleGrid
from pagemill.model.quantization.selected import Selected
from pagemill.utils.math import ceil_div

V1 = "gptq"
V2 = "gptq_v2"
"""checkpoint_format: the first stores a zero point less one."""


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """How every quantized layer is stored."""

    bits: int
    group_size: int | None
    """None: all inputs of an output."""
    ordered: bool
    """Whether each input says which group it belongs to."""
    zero_offset: int
    """What is added to a stored zero point."""


class GptqWeights(PackedMethod):
    """qweight [in / integers of a word, out], qzeros [groups, out / integers of a word], scales [groups, out]."""

    def __init__(self, layout: GptqLayout, computing: QuantMethod) -> None:
        super().__init__(computing)
        self._layout = layout

    def tensors(self, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
        layout = self._layout
        num_rows, width = shape
        if width * layout.bits % WORD or num_rows * layout.bits % WORD:
            raise ShapeError(f"a weight of {num_rows} x {width} cannot be stored in words of {layout.bits} bits: gptq")
        whole_words = WORD % layout.bits == 0  # otherwise integers lie over the ends of words
        per_word = WORD // layout.bits
        size = min(layout.group_size or width, width)
        num_groups = ceil_div(width, size)
        group_columns = None if layout.ordered or layout.group_size is None else Axis(0, size)
        return (
            StoredTensor(
                "qweight",
                (width * layout.bits // WORD, num_rows),
                (torch.int32,),
                rows=Axis(1),
                columns=Axis(0, per_word) if whole_words else None,
            ),
            StoredTensor(
                "qzeros",
                (num_groups, num_rows * layout.bits // WORD),
                (torch.int32,),
                rows=Axis(1, per_word) if whole_words else None,
                columns=group_columns,
            ),
            StoredTensor("scales", (num_groups, num_rows), rows=Axis(1), columns=group_columns),
            StoredTensor(
                "g_idx",
                (width,),
                (torch.int32,),
                columns=Axis(0),
                values=range(num_groups),
                unused=not layout.ordered,
            ),
            # Some writers give every layer a bias; a layer that has one declares it after these.
            StoredTensor("bias", (num_rows,), rows=Axis(0), unused=True, zeros=True),
        )

    def decode(
        self, stored: Mapping[str, Tensor | QuantizedTensor], part: WeightPart, dtype: torch.dtype
    ) -> Tensor | QuantizedTensor:
        tensors = only_tensors(stored)
        layout = self._layout
        bits = layout.bits
        words, scales, zero_words = tensors["qweight"], tensors["scales"], tensors["qzeros"]
        groups = ScaleGrid(1, layout.group_size).groups(part, words.device)
        if layout.ordered:
            groups = tensors["g_idx"].long()
        # A rank's part may begin or end within a word.
        is_whole = len(words) * WORD == len(groups) * bits and zero_words.shape[1] * WORD == scales.shape[1] * bits
        if bits in (4, 8) and self.takes_blocks and is_whole:
            if self._is_centred(zero_words):
                return WordWeight(Words.OF_INPUTS, words, scales, groups, bits=bits)
            if bits == 4:
                as_stored = ZeroWords(zero_words, 1, added=layout.zero_offset)
                return WordWeight(Words.OF_INPUTS, words, scales, groups, as_stored)
        first = first_read(part.columns, bits, part.splits_columns)
        values = unpack(words.t().contiguous(), bits, first + len(part.columns))[:, first:]
        found = centred(values.contiguous(), bits)
        zeros = self._zeros(zero_words, part)
        if zeros is not None:
            zeros = zeros.t().contiguous()
        return PackedWeight(bits, found, scales.t().contiguous(), groups, zeros)

    def _is_centred(self, packed: Tensor) -> bool:
        """Whether all zero points of 4 or 8 bits that were read of qzeros are the integer in the middle."""
        stored = (1 << self._layout.bits - 1) - self._layout.zero_offset
        byte = stored if self._layout.bits == 8 else stored << 4 | stored
        usual = torch.full((4,), byte, dtype=torch.uint8).view(torch.int32)
        return all(bool((few == usual).all()) for few in few_rows(packed, packed.shape[1]))

    def _zeros(self, packed: Tensor, part: WeightPart) -> Tensor | None:
        """[G, rows of the part] int8 around 0, of what was read of qzeros; None: all are 0."""
        bits = self._layout.bits
        first = first_read(part.rows, bits, not part.splits_columns)
        made = []
        for few in few_rows(packed, len(part.rows)):
            stored = unpack(few, bits, first + len(part.rows))[:, first:]
            made.append(centred(stored + self._layout.zero_offset & (1 << bits) - 1, bits))
        return torch.cat(made) if any(bool(zeros.any()) for zeros in made) else None


def make(request: QuantRequest) -> Quantization:
    """Raises ModelError for a configuration that is damaged, or asks for what is not supported."""
    computing = as_stored(request)
    config = Fields("quantization_config", request.config)
    config.choose("checkpoint_format", (None, V1, V2))
    for key in ("dynamic", "is_marlin_format"):
        config.refuse(key)
    layout = GptqLayout(
        bits=int(config.choose("bits", (2, 3, 4, 8))),
        group_size=config.size("group_size"),
        ordered=config.flag("desc_act"),
        zero_offset=0 if config.get("checkpoint_format", str) == V2 else 1,
    )
    blocks = config.get("modules_in_block_to_quantize", list) or []
    inner = [name for names in blocks for name in (names if isinstance(names, list) else [names])]
    only = Fields(config.name, {"modules_in_block_to_quantize": inner}).strings("modules_in_block_to_quantize")
    return Selected(
        GptqWeights(layout, computing),
        computing,
        skipped=config.strings("modules_to_not_convert"),
        only=only,
        head=config.flag("lm_head"),
    )
