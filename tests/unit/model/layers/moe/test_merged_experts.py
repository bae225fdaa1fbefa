"""Experts of one tensor, all together by the kernels for GPUs as one after the other on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from pagemill.model.kernels.linear import packs_natively
from pagemill.model.kernels.moe import SILU, ExpertForm
from pagemill.model.layers.moe import merged_experts
from pagemill.model.layers.moe.merged_experts import MergedExperts, MergedForm
from pagemill.model.quantization.device import DeviceWeights
from pagemill.model.quantization.device_experts import DeviceExperts
from pagemill.model.quantization.experts import SeparateExperts
from pagemill.model.quantization.integers import Integers
from pagemill.model.quantization.interface import QuantMethod
from pagemill.model.quantization.mxfp4 import Mxfp4Experts
from tests.fakes.stored_formats import mxfp4_experts

SIZE, COUNT = 96, 4
CLAMPED = MergedForm(ExpertForm(clamp=(1.702, 1.0)), pairs=True, biases=True)
FORMS = {"gpt-oss": CLAMPED, "llama 4": MergedForm(SILU, weighs_inputs=True), "pairs": MergedForm(SILU, pairs=True)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_of(inner: int, form: MergedForm, *, quantized: bool) -> dict[str, torch.Tensor]:
    stored = {}
    for name, shape in (("gate_up_proj", (SIZE, 2 * inner)), ("down_proj", (inner, SIZE))):
        weight = random(COUNT, *shape, seed=len(name)) / shape[0] ** 0.5
        if quantized:
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = mxfp4_experts(weight)
        else:
            stored[name] = weight
    if form.biases:
        stored |= {"gate_up_proj_bias": random(COUNT, 2 * inner, seed=3), "down_proj_bias": random(COUNT, SIZE, seed=4)}
    return stored


def held(
    stored: dict[str, torch.Tensor],
    inner: int,
    form: MergedForm,
    method: QuantMethod,
    rank: int,
    ranks: int,
    ep: bool,
    dtype: torch.dtype = torch.float32,
) -> MergedExperts:
    group = SimpleNamespace(rank=rank, size=ranks)
    ctx = SimpleNamespace(
        name="experts", dtype=dtype, exchange=None, expert_parallel=ep,
        groups=SimpleNamespace(tp=group, ep=group), method=lambda _, role: method,
    )  # fmt: skip
    experts = MergedExperts((SIZE, inner, COUNT), form, ctx=ctx)
    for declared in experts.checkpoint_tensors():
        experts.load(declared.stored.kind, 0, declared.part.of(stored[declared.stored.kind]))
    return experts


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("ranks", "ep"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("inner_of_rank", [64, 96])
def test_together_as_one_after_the_other(
    name: str, quantized: bool, ranks: int, ep: bool, inner_of_rank: int, monkeypatch: pytest.MonkeyPatch
):
    form = FORMS[name]
    inner = inner_of_rank * ranks
    stored = stored_of(inner, form, quantized=quantized)
    computing = DeviceWeights(torch.float32)
    method = Mxfp4Experts(computing) if quantized else computing
    x = random(5, SIZE, seed=7)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(8))
    whole = held(stored, inner, form, method, 0, 1, ep=False)
    assert whole.weights is None
    expected = whole(x, chosen, weights)
    monkeypatch.setattr(merged_experts, "_fuses", lambda *_: True)
    parts = [held(stored, inner, form, method, rank, ranks, ep) for rank in range(ranks)]
    for part in parts:
        assert isinstance(part.weights, DeviceExperts)
        assert part.weights.gate_up.form == part.weights.down.form == ("packed" if quantized else "floats")
        assert part.gate_up.numel() == part.down.numel() == 0
    summed = sum(part(x, chosen, weights) for part in parts)
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts[0](x, chosen, weights), parts[0](x, chosen, weights), rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_panels_as_floats(name: str, quantized: bool, ranks: int):
    """On a CPU in bfloat16; what is stored in 4 bits is multiplied as integers."""
    if not packs_natively():
        pytest.skip("this machine has no kernels for experts")
    form = FORMS[name]
    stored = stored_of(64 * ranks, form, quantized=quantized)
    x = random(5, SIZE, seed=7)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(8))
    computing = DeviceWeights(torch.float32)
    plain = Mxfp4Experts(computing) if quantized else computing
    expected = held(stored, 64 * ranks, form, plain, 0, 1, ep=False)(x, chosen, weights)
    panels = Integers(quantize_floats=False)
    method = Mxfp4Experts(panels) if quantized else panels
    sizes = stored, 64 * ranks, form, method
    parts = [held(*sizes, rank, ranks, ep=False, dtype=torch.bfloat16) for rank in range(ranks)]
    assert all(isinstance(part.weights, SeparateExperts) for part in parts)
    assert all(part.native(2) is not None for part in parts)
    found = sum(part(x.bfloat16(), chosen, weights).float() for part in parts)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_part_that_begins_within_a_group_is_dequantized(monkeypatch: pytest.MonkeyPatch):
    stored = stored_of(96, CLAMPED, quantized=True)
    method = Mxfp4Experts(DeviceWeights(torch.float32))
    x, weights = random(3, SIZE, seed=7), torch.ones(3, 1)
    chosen = torch.tensor([[0], [2], [3]], dtype=torch.int32)
    expected = held(stored, 96, CLAMPED, method, 0, 1, ep=False)(x, chosen, weights)
    monkeypatch.setattr(merged_experts, "_fuses", lambda *_: True)
    parts = [held(stored, 96, CLAMPED, method, rank, 2, ep=False) for rank in (0, 1)]
    summed = parts[0](x, chosen, weights) + parts[1](x, chosen, weights)
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-5)
    assert parts[1].weights.down.form == "floats"
