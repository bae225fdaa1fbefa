"""Integers made of floats for a GPU: which, and how near."""

import pytest
import torch

from pagemill.model.quantization.device import GroupedWeight
from pagemill.model.quantization.device_experts import DeviceExperts
from pagemill.model.quantization.device_made import EIGHT_BITS, MadeOnDevice, quantize_8
from pagemill.model.quantization.int4 import make as make_4
from pagemill.model.quantization.int4 import make_64
from pagemill.model.quantization.integers import make as make_8
from pagemill.model.quantization.interface import ExpertSizes, QuantRequest, Role
from pagemill.model.quantization.unquantized import PlainWeight

REQUEST = QuantRequest(torch.float32, "cuda")
CLOSE = {4: 0.2, 8: 0.02}
"""Of integers of so many bits: what the product of random weights may be off by, and of random inputs."""


@pytest.mark.parametrize(
    ("make", "width", "bits", "group"),
    [(make_8, 256, 8, 128), (make_8, 96, 8, 32), (make_4, 96, 4, 32), (make_64, 128, 4, 64), (make_64, 96, 8, 32)],
)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_linear_layers(make, width, bits, group, gate, caplog):
    weight = torch.randn(48, width) / width**0.5
    held = make(REQUEST).method("model.layers.0.mlp.up_proj", Role.LINEAR).prepare(weight, gate)
    assert isinstance(held, GroupedWeight)
    assert (held.packed.bits, held.packed.group) == (bits, group)
    x = torch.randn(5, width)
    expected = torch.nn.functional.linear(x, weight)
    if gate is not None:
        first, second = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(first) * second
    error = (held.apply(x, None) - expected).norm() / expected.norm()
    assert 0 < error < CLOSE[bits]
    assert ("become integers of 8 bits, not 4" in caplog.text) == (make is make_64 and bits == 8)


@pytest.mark.parametrize("make", [make_8, make_4])
def test_what_has_no_whole_groups_stays_floats(make, caplog):
    weight = torch.randn(48, 100)
    held = make(REQUEST).method("model.layers.0.mlp.up_proj", Role.LINEAR).prepare(weight)
    assert isinstance(held, PlainWeight)
    assert torch.equal(held.weight, weight)
    assert "layers of 100 inputs stay floats: --quantization is of multiples of 32 inputs" in caplog.text


@pytest.mark.parametrize("role", [Role.HEAD, Role.EMBEDDING])
def test_head_and_embedding(role):
    held = make_4(REQUEST).method("lm_head", role).prepare(torch.randn(64, 128))
    assert isinstance(held, GroupedWeight)
    assert held.packed.bits == 8
    assert not held.gives_rows, "the embedding keeps its floats"


@pytest.mark.parametrize(("make", "bits"), [(make_8, 8), (make_4, 4)])
def test_experts(make, bits):
    method = make(REQUEST).method("model.layers.0.mlp.experts.0.up_proj", Role.LINEAR)
    experts = method.experts(ExpertSizes(2, 128, 64), torch.float32, torch.device("cpu"), "silu")
    assert isinstance(experts, DeviceExperts)
    weights = [(torch.randn(128, 128) / 11, torch.randn(128, 64) / 8) for _ in range(2)]
    for index, (gate_up, down) in enumerate(weights):
        experts.put_gate_up(index, gate_up)
        experts.put_down(index, down)
    assert experts.gate_up.packed is not None and experts.down.packed is not None
    x = torch.randn(3, 128)
    chosen = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    found = experts.apply(x, chosen, torch.ones(3, 1), 0)
    wanted = []
    for row, (index,) in zip(x, chosen.tolist(), strict=True):
        first, second = (weights[index][0] @ row).chunk(2)
        wanted.append(weights[index][1] @ (torch.nn.functional.silu(first) * second))
    expected = torch.stack(wanted)
    assert 0 < (found - expected).norm() / expected.norm() < 2 * CLOSE[bits]


def test_eight_bits_are_the_nearest():
    weight = torch.randn(8, 64)
    weight[3] = 0
    made = quantize_8(weight, 32)
    assert (made.dequantized(torch.float32) - weight).abs().max() <= made.scales.max() * 0.5001
    assert not made.values[3].any()
    assert made.values.abs().amax() == 127
    again = MadeOnDevice(torch.float32, EIGHT_BITS).made(made)
    assert again is made, "what is quantized stays as it is"
