"""`Packed`: weights of integers of 4 or 8 bits, or of 4-bit floats, in groups of inputs, as GPUs read them, and
products with them: by Triton on GPUs, else plain torch.

A tile holds 64 outputs and a *span* of inputs, 128 of 4 bits or 64 of 8 bits, as 64 x 32 words of 16 bits, 4 KiB that
follow each other; after it comes the next span of the same outputs. Word j of an output holds the inputs j, j + 32,
... of the span, the first in its lowest bits, so that the integers at one place of all words belong to 32 neighbouring
inputs. Arguments are not checked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.reference import gated
from pagemill.utils.math import ceil_div

PLANE = 32
"""Neighbouring inputs whose integers lie at one place of the words of a span; groups are made of them."""
TILE = 64
"""Outputs of a tile."""
_PADDED = 128
"""Outputs come in multiples of it."""
_ROWS_AT_ONCE = 4096
HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the values of 4-bit floats (e2m1), by their bits."""
_MOST_HALVES = 12


@dataclass(frozen=True, slots=True)
class Packed:
    """weight[o, i] = (integer[o, i] + offsets[g, o]) * scales[g, o], g = i // group."""

    words: Tensor
    """[outputs / 64, spans, 64, 32] int16, of integers from 0 up: 2^(bits - 1) was added; or of e2m1 floats."""
    scales: Tensor
    """[groups, outputs] float32, of whole spans and of outputs in multiples of 128."""
    offsets: Tensor | None
    """The same of minus the zero points, which are whole numbers; None: all are 0."""
    num_outputs: int
    num_inputs: int
    bits: int
    group: int
    """Inputs: 32 or 64, or a multiple of a span."""
    halves: bool = False
    """Whether the 4 bits are those of an e2m1 float, whose double is the integer; offsets are None then."""

    @property
    def num_spans(self) -> int:
        """How many spans (128 inputs of 4 bits, 64 of 8) the inputs take, the last one padded."""
        return int(self.words.shape[1])


def span(bits: int) -> int:
    """Inputs of a tile."""
    return PLANE * (16 // bits)


def held_group(size: int, num_inputs: int, bits: int) -> int | None:
    """The group in which `pack` holds groups of `size` inputs, its divisor; None where it cannot."""
    if size >= num_inputs:
        return ceil_div(num_inputs, span(bits)) * span(bits)
    if size % span(bits) == 0:
        return size
    if size in (PLANE, 2 * PLANE):
        return size
    return PLANE if size % PLANE == 0 else None


def pack(values: Tensor, scales: Tensor, zeros: Tensor | None, size: int, bits: int, *, halves: bool = False) -> Packed:
    """values [N, K] int8 of -2^(bits - 1) and up; scales, and zeros where not all are 0, [N, ceil(K / size)]. With
    `halves`, 4 bits are enough for values that are twice an e2m1 float, and there are no zeros. Raises ValueError for
    groups that `held_group` says no to."""
    num_outputs, num_inputs = values.shape
    group = held_group(size, num_inputs, bits)
    if group is None:
        raise ValueError(f"groups of {size} inputs cannot be packed: multiples of {PLANE} can, and all inputs")
    spans = ceil_div(num_inputs, span(bits))
    rows = ceil_div(num_outputs, _PADDED) * _PADDED
    words = torch.zeros(rows // TILE, spans, TILE, PLANE, dtype=torch.int16, device=values.device)
    for begin in range(0, rows, _ROWS_AT_ONCE):
        part = values[begin : begin + _ROWS_AT_ONCE]
        part = _halves_bits(part) if halves else part
        tiles = min(_ROWS_AT_ONCE, rows - begin) // TILE
        padded = functional.pad(part, (0, spans * span(bits) - num_inputs, 0, tiles * TILE - len(part)))
        words[begin // TILE : begin // TILE + tiles] = _words(padded, bits)
    shape = (ceil_div(spans * span(bits), group), rows)
    repeats = max(size // group, 1)
    offsets = None if zeros is None else _grouped(zeros, repeats, shape).neg_()
    return Packed(words, _grouped(scales, repeats, shape), offsets, num_outputs, num_inputs, bits, group, halves)


def eight_bits(weight: Tensor) -> Packed | None:
    """Floats [N, K] as integers of 8 bits, in groups of 128 inputs where those are whole, else of 32; None where these
    are not."""
    num_inputs = weight.shape[1]
    size = next((size for size in (4 * PLANE, PLANE) if num_inputs % size == 0), None)
    return None if size is None else pack(*rounded(weight, size), None, size, 8)


def rounded(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Floats [N, K], in a multiple of `size` inputs -> int8 [N, K], for each group the nearest of 255 integers around
    0, its largest exact, and scales [N, K / size] float32."""
    num_outputs, num_inputs = weight.shape
    values = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(num_outputs, num_inputs // size, device=weight.device)
    for begin in range(0, num_outputs, _ROWS_AT_ONCE):
        part = weight[begin : begin + _ROWS_AT_ONCE].float().view(-1, num_inputs // size, size)
        largest = part.abs().amax(-1) / 127
        scales[begin : begin + len(part)] = largest
        made = (part / largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
        values[begin : begin + len(part)] = made.flatten(1).to(torch.int8)
    return values, scales


def floats(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [N, K]."""
    kernels = triton_kernels("packed") if weight.words.is_cuda else None
    if kernels is None:
        return reference_floats(weight, dtype)
    result: Tensor = kernels.floats(weight, dtype)
    return result


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, K] times [N, K] -> [T, N] in `out_dtype` (x's type); with a gate (silu, gelu_tanh) of the first half,
    [T, N / 2]."""
    kernels = triton_kernels("packed") if x.is_cuda else None
    if kernels is None:
        return reference_linear(x, weight, bias, gate, out_dtype)
    result: Tensor = kernels.linear(x, weight, bias, gate, out_dtype)
    return result


def rows(weight: Packed, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """[T] int64 -> [T, K]: rows of the weight, in plain torch."""
    made = _integers(weight.words[indices // TILE, :, indices % TILE], weight).flatten(1).float()
    width = made.shape[1]
    if weight.offsets is not None:
        made += weight.offsets[:, indices].T.repeat_interleave(weight.group, 1)[:, :width]
    made *= weight.scales[:, indices].T.repeat_interleave(weight.group, 1)[:, :width]
    return made[:, : weight.num_inputs].to(dtype)


def reference_floats(weight: Packed, dtype: torch.dtype) -> Tensor:
    """`floats` in plain torch."""
    integers = _integers(weight.words, weight).transpose(1, 2)
    made = integers.flatten(2).flatten(0, 1).float()
    groups = torch.arange(made.shape[1], device=made.device) // weight.group
    if weight.offsets is not None:
        made += weight.offsets.T[:, groups]
    made *= weight.scales.T[:, groups]
    result: Tensor = made[: weight.num_outputs, : weight.num_inputs].to(dtype)
    return result


def reference_linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` in plain torch, in float32."""
    result = functional.linear(x.float(), reference_floats(weight, torch.float32))
    if bias is not None:
        result += bias.float()
    return (result if gate is None else gated(result, gate == "gelu_tanh")).to(out_dtype or x.dtype)


def _integers(words: Tensor, weight: Packed) -> Tensor:
    """[..., 32] int16 -> [..., span] int32 around 0."""
    wide = words.int()
    places = [(wide >> shift) & ((1 << weight.bits) - 1) for shift in range(0, 16, weight.bits)]
    stored = torch.stack(places, -2).flatten(-2)
    return HALVES.to(words.device)[stored].int() if weight.halves else stored - (1 << (weight.bits - 1))


def _halves_bits(values: Tensor) -> Tensor:
    """Twice e2m1 floats -> their bits, int8, less what `_words` adds."""
    table = torch.zeros(2 * _MOST_HALVES + 1, dtype=torch.int8, device=values.device)
    table[HALVES.to(values.device).long() + _MOST_HALVES] = torch.arange(16, dtype=torch.int8, device=values.device)
    table[_MOST_HALVES] = 0  # both zeros have it
    return table[values.long() + _MOST_HALVES] - 8


def _words(values: Tensor, bits: int) -> Tensor:
    """[R, spans * span] int8 around 0 -> [R / 64, spans, 64, 32] int16."""
    per_word = 16 // bits
    tiled = values.view(-1, TILE, values.shape[1] // (PLANE * per_word), per_word, PLANE)
    if bits == 8:
        low, high = ((tiled[:, :, :, plane] ^ -128).view(torch.uint8) for plane in range(2))
    else:
        nibbles = (tiled + 8).view(torch.uint8)
        low = nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4
        high = nibbles[:, :, :, 2] | nibbles[:, :, :, 3] << 4
    return torch.stack([low, high], -1).view(torch.int16).squeeze(-1).transpose(1, 2)


def _grouped(limits: Tensor, repeats: int, shape: tuple[int, int]) -> Tensor:
    """[N, G] -> [groups, rows] float32, each group's so often, with zeros to fill the shape."""
    made = limits.T.float().repeat_interleave(repeats, 0)[: shape[0]]
    return functional.pad(made, (0, shape[1] - made.shape[1], 0, shape[0] - made.shape[0])).contiguous()
