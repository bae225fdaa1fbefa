"""Experts of packed integers and 4-bit floats in Triton against plain torch."""

from collections.abc import Iterator

import pytest
import torch

from pagemill.model.kernels import packed
from pagemill.model.kernels.moe import GELU, SILU, ExpertForm, reference_experts, reference_route
from pagemill.model.kernels.routing import Routing
from tests.fakes.triton_interpreter import DEVICE
from tests.unit.model.kernels.packed_cases import experts_of
from tests.unit.model.kernels.triton.test_moe import close, random

from pagemill.model.kernels.triton import launch, moe_choices, moe_packed  # isort: skip
from pagemill.model.kernels.triton import packed as kernels  # isort: skip
from pagemill.model.kernels.triton.moe_choices import PackedExpertsChoice

pytestmark = pytest.mark.cases(one_in=4)

CLAMPED = (1.702, 1.0)


KINDS = [("4", 128), ("halves", 32), ("8", 64), ("4 zeros", 32), ("4", 32), ("halves", 128)]
SIZES = [(128, 64, torch.bfloat16), (200, 128, torch.float32), (96, 192, torch.bfloat16)]


@pytest.mark.cases(one_in=50)
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize(("size", "inner", "dtype"), SIZES)
@pytest.mark.parametrize("held", [range(2, 5), range(7)])
@pytest.mark.parametrize("num_tokens", [3, 41])
def test_experts(kind: str, group: int, size: int, inner: int, dtype: torch.dtype, held: range, num_tokens: int):
    x = random(num_tokens, size + 8, dtype=dtype)[:, 8:]
    group = min(group, size, inner)
    gate_up = experts_of(2 * inner, size, group, kind, len(held), 1, DEVICE)
    down = experts_of(size, inner, group, kind, len(held), 2, DEVICE)
    routed = reference_route(random(num_tokens, 7, seed=3), Routing(3, renormalize=True))
    form = (SILU, GELU)[num_tokens % 2]
    result = moe_packed.experts(x, gate_up, down, *routed, held.start, form)
    floats = gate_up.floats(torch.float32), down.floats(torch.float32)
    close(result, reference_experts(x, *floats, *routed, held.start, form))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2, 30])
@pytest.mark.parametrize("choice", [PackedExpertsChoice(16, 32, 4, 2), PackedExpertsChoice(16, 128, 4, 2, late=False)])
def test_biases_and_clamped_gates(num_tokens: int, choice: PackedExpertsChoice, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moe_choices, "PACKED_EXPERTS", ((None, (choice, choice)),))
    x = random(num_tokens, 96, dtype=torch.bfloat16)
    gate_up, down = experts_of(256, 96, 32, "halves", 4, 1, DEVICE), experts_of(96, 128, 32, "halves", 4, 2, DEVICE)
    form = ExpertForm(clamp=CLAMPED, gate_up_bias=random(4, 256, seed=5), down_bias=random(4, 96, seed=6))
    routed = reference_route(random(num_tokens, 4, seed=3), Routing(3, renormalize=True))
    floats = gate_up.floats(torch.float32), down.floats(torch.float32)
    result = moe_packed.experts(x, gate_up, down, *routed, 0, form)
    close(result, reference_experts(x, *floats, *routed, 0, form))


@pytest.mark.cases(one_in=12)
@pytest.mark.parametrize("inner", [96, 224])
@pytest.mark.parametrize("kind", ["halves", "4 zeros", "8"])
@pytest.mark.parametrize("num_tokens", [2, 30])
def test_gates_and_ups_padded_to_tiles(inner: int, kind: str, num_tokens: int):
    x = random(num_tokens, 96, dtype=torch.bfloat16)
    gate_up = experts_of(2 * inner, 96, 32, kind, 4, 1, DEVICE, inner=inner)
    down = experts_of(96, inner, 32, kind, 4, 2, DEVICE)
    form = ExpertForm(clamp=CLAMPED, gate_up_bias=random(4, 2 * inner, seed=5), down_bias=random(4, 96, seed=6))
    routed = reference_route(random(num_tokens, 4, seed=3), Routing(3, renormalize=True))
    floats = gate_up.floats(torch.float32), down.floats(torch.float32)
    assert floats[0].shape == (4, 2 * inner, 96)
    result = moe_packed.experts(x, gate_up, down, *routed, 0, form)
    close(result, reference_experts(x, *floats, *routed, 0, form))


def test_no_tokens():
    gate_up, down = experts_of(128, 64, 32, "4", 2, 1, DEVICE), experts_of(64, 64, 32, "4", 2, 2, DEVICE)
    x = random(0, 64, dtype=torch.bfloat16)
    routed = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    assert moe_packed.experts(x, gate_up, down, *routed, 0, SILU).shape == (0, 64)


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("inner", [None, 96])
def test_floats_are_there_where_kernels_are_compiled_only(monkeypatch: pytest.MonkeyPatch, inner: int | None):
    """Layers whose two weights are of different forms are dequantized in their first step, which is a precompilation:
    those were memory that nobody had written."""
    weights = experts_of(192, 64, 32, "4 zeros", 3, 1, DEVICE, inner=inner)
    monkeypatch.setattr(packed, "floats", kernels.floats)  # as on a GPU
    with launch.no_launches():
        found = weights.floats(torch.float32)
    assert not found.isnan().any()
    expected = [kernels.floats(weights.expert(index), torch.float32) for index in range(3)]
    for ours, whole in zip(found, expected, strict=True):
        assert torch.equal(ours, whole if inner is None else torch.cat([part[:inner] for part in whole.chunk(2)]))
