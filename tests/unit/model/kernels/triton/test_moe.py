"""Routing and experts in Triton against plain torch: every way to route, few and many tokens, experts elsewhere."""

from dataclasses import replace

import pytest
import torch

from pagemill.model.kernels.moe import GELU, SILU, ExpertForm, reference_experts, reference_route
from pagemill.model.kernels.routing import Routing
from pagemill.model.quantization.experts import StackedExperts
from pagemill.model.quantization.interface import ExpertSizes
from pagemill.model.quantization.invariant import InvariantExperts
from tests.fakes.routings import ROUTINGS
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from pagemill.model.kernels.triton import moe, moe_choices, moe_sort  # isort: skip
from pagemill.model.kernels.triton.moe_choices import GroupedChoice
from pagemill.model.kernels.triton.moe_sort import sort_slots

pytestmark = pytest.mark.cases(one_in=6)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""The interpreter rounds bfloat16 towards zero."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_experts", [8, 12])
@pytest.mark.parametrize("with_bias", [False, True])
def test_routes_as_the_reference(routing: Routing, num_experts: int, with_bias: bool):
    logits = random(9, 2 * num_experts)[:, :num_experts]
    bias = random(num_experts, seed=1) if with_bias else None
    chosen, weights = moe.route(logits, routing, bias)
    expected, expected_weights = reference_route(logits, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_routing_survives_nan():
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    chosen, _ = moe.route(logits, Routing(2))
    assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("block", [16, 8192])
@pytest.mark.parametrize("tile", [1, 16])
def test_tiles_cover_every_slot_of_the_experts_here_once(
    first: int, block: int, tile: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(moe_sort, "_MAX_BLOCK", block)
    num_experts = 5
    chosen = torch.randint(0, 9, (70, 2), generator=torch.Generator().manual_seed(0)).to(torch.int32).to(DEVICE)
    order = sort_slots(chosen, first, num_experts, tile)
    seen: list[int] = []
    for expert, begin, count in order.tiles.T.tolist():
        assert count <= tile
        members = order.slots[begin : begin + count].tolist()
        assert all(chosen.reshape(-1)[slot] == first + expert for slot in members)
        assert members == sorted(members)
        seen += members
    here = (chosen >= first) & (chosen < first + num_experts)
    assert order.slots[: len(seen)].tolist() == seen
    assert sorted(seen) == here.reshape(-1).nonzero().squeeze(1).tolist()


def test_experts_without_slots_have_no_tiles():
    order = sort_slots(torch.full((40, 2), 2, dtype=torch.int32, device=DEVICE), 0, 6, 32)
    assert [tile[:3] for tile in order.tiles.T.tolist() if tile[2]] == [[2, 0, 32], [2, 32, 32], [2, 64, 16]]


def case(num_tokens: int, dtype: torch.dtype, size: int, inner: int, held: range, num_experts: int = 7):
    x = random(num_tokens, size + 8, dtype=dtype)[:, 8:]
    gate_up = random(len(held), 2 * inner, size, dtype=dtype, seed=1) / size**0.5
    down = random(len(held), size, inner, dtype=dtype, seed=2) / inner**0.5
    chosen, weights = reference_route(random(num_tokens, num_experts, seed=3), Routing(3, renormalize=True))
    return x, gate_up, down, chosen, weights, held.start


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    step = ROUNDING[actual.dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=step, atol=step * scale)


HELD = [slow(range(7)), range(2, 5)]
SIZES = [
    (64, 32, torch.float32), slow(100, 24, torch.bfloat16),
    slow(64, 32, torch.bfloat16), slow(100, 24, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("gelu", [slow(False), True])
@pytest.mark.parametrize(("size", "inner", "dtype"), SIZES)
def test_few_tokens(held: range, gelu: bool, size: int, inner: int, dtype: torch.dtype):
    args = case(3, dtype, size, inner, held)
    form = GELU if gelu else SILU
    close(moe.few(*args, form), reference_experts(*args, form))


CHOICES = [GroupedChoice(16, 32, 32, 4, 2), GroupedChoice(32, 16, 64, 4, 2, swap=True)]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("size", "inner", "dtype"), SIZES)
def test_many_tokens(held: range, choice: GroupedChoice, size: int, inner: int, dtype: torch.dtype):
    x, gate_up, down, chosen, weights, first = args = case(41, dtype, size, inner, held)
    result = moe.grouped(x, gate_up, down, (chosen, weights), first, SILU, (choice, choice))
    close(result, reference_experts(*args))


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_weights_of_8_bits(num_tokens: int):
    x, gate_up, down, *routed = case(num_tokens, torch.float32, 64, 32, range(7))
    scales = tuple(weight.abs().amax(-1) / 448 for weight in (gate_up, down))
    packed = [
        (weight / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
        for weight, scale in zip((gate_up, down), scales, strict=True)
    ]
    result = moe.experts(x, *packed, *routed, SILU, scales)
    close(result, reference_experts(x, *packed, *routed, SILU, scales))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize(("size", "inner", "dtype"), [(128, 100, torch.bfloat16), (320, 192, torch.float32)])
def test_weights_of_8_bits_with_factors_of_groups(num_tokens: int, size: int, inner: int, dtype: torch.dtype):
    x, gate_up, down, *routed = case(num_tokens, dtype, size, inner, range(7))
    packed = [(20 * weight).to(torch.float8_e4m3fn) for weight in (gate_up, down)]
    scales = tuple(
        random(len(weight), -(-weight.shape[2] // 128), weight.shape[1], seed=4).abs() / 20 for weight in packed
    )
    result = moe.experts(x, *packed, *routed, SILU, scales)
    close(result, reference_experts(x, *packed, *routed, SILU, scales))


@pytest.mark.parametrize("num_tokens", [0, 1, slow(21), slow(22)])
def test_the_number_of_tokens_decides_how(num_tokens: int):
    args = case(num_tokens, torch.float32, 32, 16, range(7))
    assert moe_choices.MAX_FEW_SLOTS in range(21 * 3, 22 * 3)
    close(moe.experts(*args), reference_experts(*args)) if num_tokens else moe.experts(*args)


BIASED = ExpertForm(clamp=(1.702, 7.0), gate_up_bias=random(7, 48, seed=5), down_bias=random(7, 104, seed=6))


# Rows of slots elsewhere are not written; what is made of them is not kept.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
@pytest.mark.parametrize("form", [SILU, slow(GELU), BIASED])
def test_few_tokens_in_one_sum(held: range, dtype: torch.dtype, form: ExpertForm):
    if form is BIASED:
        biases = {name: getattr(form, name)[held.start : held.stop].to(dtype) for name in ("gate_up_bias", "down_bias")}
        form = replace(form, **biases)
    args = (*case(3, dtype, 104, 24, held), form)
    close(moe.few_one_sum(*args), reference_experts(*args))


WAYS = [
    (1, torch.bfloat16, False, "few_one_sum"), (1, torch.bfloat16, True, "few_one_sum"),
    slow(30, torch.bfloat16, False, "grouped"), (2, torch.bfloat16, True, "grouped"),
    slow(1, torch.float32, False, "few"), (1, torch.float32, True, "grouped"),
]  # fmt: skip


@pytest.mark.parametrize(("num_tokens", "dtype", "invariant", "way"), WAYS)
def test_tokens_type_and_mode_decide_how(
    num_tokens: int, dtype: torch.dtype, invariant: bool, way: str, monkeypatch: pytest.MonkeyPatch
):
    for name in {"few", "few_one_sum", "grouped"} - {way}:
        monkeypatch.delattr(moe, name)
    args = case(num_tokens, dtype, 64, 32, range(7))
    close(moe.experts(*args, invariant=invariant), reference_experts(*args))


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("kind", [StackedExperts, InvariantExperts])
def test_the_experts_of_a_layer_are_computed_by_them(kind: type[StackedExperts], monkeypatch: pytest.MonkeyPatch):
    """As an engine calls them: one token one by one."""
    monkeypatch.delattr(moe, "few")
    monkeypatch.delattr(moe, "grouped")
    x, gate_up, down, *routed = case(1, torch.bfloat16, 64, 32, range(7))
    held = kind(ExpertSizes(7, 64, 32), torch.bfloat16, torch.device(DEVICE), "silu")
    for expert in range(7):
        held.put_gate_up(expert, gate_up[expert])
        held.put_down(expert, down[expert])
    close(
        held.apply(x.as_subclass(OnGPU), *routed).as_subclass(torch.Tensor),
        reference_experts(x, gate_up, down, *routed),
    )


def test_slots_are_grouped_where_experts_have_several():
    """Whatever is measured faster: 8 of 128 experts for up to 8 tokens, 2 of 8 for two."""
    assert moe_choices.one_by_one(8, 64, 128)
    assert not moe_choices.one_by_one(9, 72, 160)
    assert moe_choices.one_by_one(2, 4, 8)
    assert not moe_choices.one_by_one(3, 6, 8)
    assert moe_choices.one_by_one(1, 6, 8)


def test_every_number_of_slots_has_tiles_of_one_height():
    for average in (0.1, 5, 15, 40, 1000):
        gate_up, down = moe_choices.grouped_choices(int(average * 128), 128)
        assert gate_up.block_m == down.block_m


@pytest.mark.parametrize("num_bytes", [2, 4])
def test_tiles_fit_into_shared_memory(num_bytes: int):
    """Of compute capability 9.0; the first layer's tile holds gate and up."""
    for average in (0.1, 5, 15, 40, 1000):
        for parts, choice in zip((2, 1), moe_choices.grouped_choices(int(average * 128), 128, num_bytes), strict=True):
            inputs = (choice.block_m + parts * choice.block_n) * choice.block_k
            assert inputs * num_bytes * choice.num_stages <= 227 << 10
