"""Words of 32 bits with 4-bit integers of eight outputs, which are weights or zero points, one in a byte and one beside
the other. Knows no file format.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import OCTET
from pagemill.model.loading.few_rows import few_rows
from pagemill.model.loading.packed_weight import NIBBLE_ZERO

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, counted from the lowest, each of eight outputs has (`Words.OF_OUTPUTS`)."""


def outputs_of(words: Tensor, places: tuple[int, ...] = PLACES, added: int = 0) -> Tensor:
    """[n, out / 8] int32, n > 0 -> [n, out] int8: their integers, four bits of the sum with `added`, less 8."""
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device) * 4
    made = [
        (((few.unsqueeze(-1) >> shifts) + added) & 15).flatten(1).to(torch.int8).sub_(NIBBLE_ZERO)
        for few in few_rows(words, words.shape[1] * OCTET)
    ]
    return torch.cat(made)


def zero_integers(zeros: ZeroWords, count: int) -> Tensor:
    """`PackedWeight.zeros` of so many outputs, [count, G] int8."""
    by_group = zeros.words if zeros.dim else zeros.words.t()
    made = outputs_of(by_group, zeros.places, zeros.added)
    return made[:, zeros.first : zeros.first + count].t().contiguous()


def joined_zeros(parts: Sequence[ZeroWords | None]) -> ZeroWords | None:
    """Those of all outputs of weights, in whole words of one kind, one part's after the other's; None where none has
    any."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    first = found[0]
    words = torch.cat([part.words for part in found], first.dim)
    return ZeroWords(words, first.dim, first.places, first.added)


def are_alike(one: ZeroWords | None, other: ZeroWords | None) -> bool:
    """Whether the words of both are to be read in one way, or both are None."""
    if one is None or other is None:
        return one is other
    return (one.dim, one.places, one.added) == (other.dim, other.places, other.added)


def has_whole_words(zeros: ZeroWords | None, count: int) -> bool:
    """Whether those of so many outputs begin and end with a word, or there are none."""
    return zeros is None or zeros.words.shape[zeros.dim] * OCTET == count
