"""Experts in blocks of 8-bit floats, made of floats: how a GPU holds them."""

import pytest
import torch

from pagemill.model.kernels.fp8 import FP8
from pagemill.model.kernels.moe import reference_experts
from pagemill.model.quantization.fp8_blocks import BlockExperts, Fp8Blocks, quantize
from pagemill.model.quantization.interface import ExpertSizes

SIZES = ExpertSizes(3, 192, 64)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_experts_of_a_gpu_are_held_for_its_kernels(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    held = Fp8Blocks().experts(SIZES, torch.bfloat16, torch.device("cuda"), "silu")
    assert isinstance(held, BlockExperts)
    plain = []
    for expert in range(3):
        weights = torch.randn(128, 192).bfloat16() / 16, torch.randn(192, 64).bfloat16() / 8
        held.put_gate_up(expert, weights[0])
        held.put_down(expert, weights[1])
        plain.append([quantize(weight).dequantized(torch.bfloat16) for weight in weights])
    assert held.gate_up.plain.dtype == held.down.plain.dtype == (FP8 if capability >= (8, 9) else torch.bfloat16)
    x = torch.randn(5, 192).bfloat16()
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [7, 2]], dtype=torch.int32)
    factors = torch.rand(5, 2)
    expected = reference_experts(x, *(torch.stack(part) for part in zip(*plain, strict=True)), chosen, factors, 0)
    torch.testing.assert_close(held.apply(x, chosen, factors, 0), expected, rtol=3e-2, atol=3e-2)


def test_experts_of_a_cpu_are_weights_of_their_own():
    held = Fp8Blocks().experts(SIZES, torch.bfloat16, torch.device("cpu"), "silu")
    assert not isinstance(held, BlockExperts)
