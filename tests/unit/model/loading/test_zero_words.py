"""Words of eight outputs: which integer each has, and those of several weights one beside the other."""

import torch

from pagemill.model.kernels.pack_limits import IN_ORDER, ZeroWords
from pagemill.model.loading.zero_words import (
    PLACES,
    are_alike,
    has_whole_words,
    joined_zeros,
    outputs_of,
    zero_integers,
)

WORD = 0x76543210


def test_half_bytes_in_their_places() -> None:
    words = torch.tensor([[WORD, 0]], dtype=torch.int32)
    assert outputs_of(words).tolist() == [[place - 8 for place in (0, 4, 1, 5, 2, 6, 3, 7)] + [-8] * 8]
    assert outputs_of(words, IN_ORDER).tolist() == [[place - 8 for place in range(8)] + [-8] * 8]
    assert outputs_of(words, IN_ORDER, 9).tolist() == [[1, 2, 3, 4, 5, 6, 7, -8] + [1] * 8]


def test_either_dimension_has_the_outputs() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (3, 2)).int()
    found = zero_integers(ZeroWords(words, 1, PLACES, 1), 16)
    assert torch.equal(found, outputs_of(words, PLACES, 1).t())
    turned = words.t().contiguous()
    assert torch.equal(zero_integers(ZeroWords(turned, 0, PLACES, 1), 16), found)
    assert torch.equal(zero_integers(ZeroWords(turned, 0, PLACES, 1, first=3), 9), found[3:12])


def test_those_of_several_weights() -> None:
    parts = [torch.randint(-(1 << 31), 1 << 31, (3, 2)).int() for _ in range(2)]
    zeros = [ZeroWords(part, 1, added=1) for part in parts]
    joined = joined_zeros(zeros)
    assert joined is not None
    assert torch.equal(zero_integers(joined, 32), torch.cat([zero_integers(part, 16) for part in zeros]))
    turned = joined_zeros([ZeroWords(part, 0) for part in parts])
    assert turned is not None
    assert turned.words.shape == (6, 2)
    assert joined_zeros([None, None]) is None


def test_whole_words() -> None:
    words = torch.zeros(2, 3, dtype=torch.int32)
    assert has_whole_words(None, 5)
    assert has_whole_words(ZeroWords(words, 0), 16)
    assert has_whole_words(ZeroWords(words, 1), 24)
    assert not has_whole_words(ZeroWords(words, 0), 15)
    assert not has_whole_words(ZeroWords(words, 0, first=4), 12)


def test_what_is_read_in_one_way() -> None:
    words = torch.zeros(1, 1, dtype=torch.int32)
    zeros = ZeroWords(words, 1)
    assert are_alike(zeros, ZeroWords(words.clone(), 1))
    assert are_alike(None, None)
    for other in (None, ZeroWords(words, 0), ZeroWords(words, 1, PLACES), ZeroWords(words, 1, added=1)):
        assert not are_alike(zeros, other)
