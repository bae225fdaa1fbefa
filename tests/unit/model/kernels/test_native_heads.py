"""A linear layer for each head, in native code, against torch, per instruction set."""

import pytest
import torch

from pagemill.model.kernels.native_heads import HeadParts, NativeHeads, packs_heads
from pagemill.model.kernels.weight_memory import WeightMemory
from tests.marks import slow

HEADS, INPUTS, OUTPUTS = 5, 24, 40


@pytest.mark.parametrize("threads", [1, slow(3)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, slow(300)])
def test_heads_read_and_write_their_parts(isa: str, num_tokens: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(HEADS, OUTPUTS, INPUTS, generator=generator) / 5).bfloat16()
    x = torch.randn(num_tokens, HEADS, 8 + INPUTS, generator=generator).bfloat16()
    out = torch.full((num_tokens, HEADS + 1, 6 + OUTPUTS), 7.0).bfloat16()
    placed = NativeHeads.of(weights, WeightMemory()).placed(HeadParts(8 + INPUTS, 8), HeadParts(6 + OUTPUTS, 6))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        placed.apply(x, out)
    finally:
        torch.set_num_threads(before)
    expected = torch.einsum("thi,hoi->tho", x[..., 8:].float(), weights.float())
    torch.testing.assert_close(out[:, :HEADS, 6:].float(), expected, rtol=1e-2, atol=1e-2)
    assert (out[..., :6] == 7).all()
    assert (out[:, HEADS] == 7).all()


def test_what_native_code_takes() -> None:
    weights = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert packs_heads(weights)
    assert not packs_heads(weights.float())
    assert not packs_heads(weights[..., :3])
