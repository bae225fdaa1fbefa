"""Integers of a few bits out of words of 32, as checkpoints pack them. Knows no file format."""

import torch
from torch import Tensor

WORD = 32


def unpack(packed: Tensor, bits: int, count: int | None = None) -> Tensor:
    """[N, W] int32 -> [N, count] uint8: integers of 2 to 8 bits that lie side by side along the last dimension, the
    first in the lowest bits; where 32 is no multiple of `bits`, over the ends of words (3 bits: 32 in 3 words).

    `count`: by default, as many as there is room for.
    """
    room = packed.shape[1] * WORD // bits
    count = room if count is None else count
    if bits == 8:
        return packed.contiguous().view(torch.uint8)[:, :count]
    if bits == 4:
        as_bytes = packed.contiguous().view(torch.uint8)
        return torch.stack([as_bytes & 15, as_bytes >> 4], -1).flatten(1)[:, :count]
    first_bits = torch.arange(count, device=packed.device) * bits
    words = first_bits // WORD
    shifts = first_bits % WORD
    wide = packed.long() & 0xFFFFFFFF
    values = wide[:, words] >> shifts
    following = wide[:, (words + 1).clamp(max=packed.shape[1] - 1)]
    values |= (following << (WORD - shifts)) * (shifts + bits > WORD)
    return (values & (1 << bits) - 1).to(torch.uint8)


def pairs(packed: Tensor, first: int, count: int) -> Tensor | None:
    """[N, W] int32 of integers of 4 bits, side by side -> [N, count / 2] uint8: those from `first` on as they are, two
    in a byte, the first in the lower half. None where they begin or end within a byte, or lie apart."""
    if first % 2 or count % 2 or packed.stride(1) != 1:
        return None
    return packed.view(torch.uint8)[:, first // 2 : (first + count) // 2]


def first_read(wanted: range, bits: int, is_split: bool) -> int:
    """Where the wanted integers begin in what was read of a row: all of it, or, `is_split`, only the words that hold
    them, which is not done where integers lie over the ends of words."""
    return wanted.start % (WORD // bits) if is_split and WORD % bits == 0 else wanted.start


def unpack_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """The same, but whole integers in each word only: with 5 bits, 6 of them in each word and 2 bits unused."""
    per_word = WORD // bits
    shifts = torch.arange(per_word, device=packed.device, dtype=torch.int32) * bits
    spread = packed.unsqueeze(-1) >> shifts
    return (spread & (1 << bits) - 1).to(torch.uint8).flatten(1)[:, :count]


def centred(integers: Tensor, bits: int) -> Tensor:
    """uint8, 0 and up -> int8 around 0."""
    return (integers ^ 0x80).view(torch.int8) if bits == 8 else integers.view(torch.int8) - (1 << bits - 1)
