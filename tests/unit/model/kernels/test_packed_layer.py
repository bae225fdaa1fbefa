"""Which layers the one kernel between two attentions takes."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.kernels.packed import Packed
from pagemill.model.kernels.packed_layer import HIDDEN, MAX_ROWS, LayerWeights, PackedLayer, between, fits

Sizes = tuple[int, int, int]
"""Inner size, inputs of o, outputs of qkv."""
QWEN: Sizes = (12288, 4096, 6144)


def weight(outputs: int, inputs: int) -> Packed:
    words = torch.empty(outputs // 64, inputs // 128, 64, 32, dtype=torch.int16, device="meta")
    scales = torch.empty(inputs // 128, outputs, device="meta")
    return Packed(words, scales, None, outputs, inputs, 4, 128)


def layer(sizes: Sizes, hidden: int = HIDDEN) -> LayerWeights:
    inner, mixed, qkv = sizes
    norm = torch.empty(hidden, device="meta")
    parts = weight(hidden, mixed), weight(2 * inner, hidden), weight(hidden, inner), weight(qkv, hidden)
    return LayerWeights(*parts, norm, norm, (1e-6, 1e-6))


@pytest.mark.parametrize("sizes", [QWEN, (14336, 4096, 6144), (2048, 8192, 2048), (16384, 4096, 8192)])
def test_layers_that_fit(sizes: Sizes):
    assert fits(layer(sizes))


@pytest.mark.parametrize("sizes", [(12032, 4096, 6144), (12288, 2048, 6144), (12288, 4096, 6400), (18432, 4096, 6144)])
def test_sizes_that_do_not_fit(sizes: Sizes):
    assert not fits(layer(sizes))


def test_other_formats_do_not_fit():
    whole = layer(QWEN)
    assert not fits(layer(QWEN, hidden=5120))
    for change in ({"bits": 8}, {"group": 64}, {"halves": True}, {"offsets": torch.empty(32, 4096)}):
        assert not fits(replace(whole, o=replace(whole.o, **change))), change


def test_there_is_none_without_a_gpu():
    assert between(layer(QWEN)) is None


def test_rows_that_it_takes():
    assert PackedLayer.takes(torch.empty(MAX_ROWS, 4096, dtype=torch.bfloat16))
    for x in (torch.empty(0, 4096), torch.empty(MAX_ROWS + 1, 4096)):
        assert not PackedLayer.takes(x.bfloat16())
    assert not PackedLayer.takes(torch.empty(1, 4096, dtype=torch.float16))
