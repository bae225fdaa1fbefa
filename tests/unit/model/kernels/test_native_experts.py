"""Routers and experts in native code against torch, per instruction set."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.linear import GELU_TANH, SILU, pack_bf16
from pagemill.model.kernels.moe import ExpertForm, form_of, reference_experts, reference_route
from pagemill.model.kernels.native_experts import NativeExperts, NativeRouting
from pagemill.model.kernels.routing import Routing
from tests.fakes.routings import ROUTINGS
from tests.marks import slow

pytestmark = pytest.mark.cases(one_in=4)

COUNT, SIZE, INNER = 7, 66, 40


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(first: int, top_k: int, gate: str = "silu") -> tuple[NativeExperts, Tensor, Tensor]:
    """Experts, and their weights [N, 2 * I, E] and [N, E, I]."""
    gate_up = (random(COUNT, 2 * INNER, SIZE, seed=1) / 8).bfloat16()
    down = (random(COUNT, SIZE, INNER, seed=2) / 6).bfloat16()
    number = SILU if gate == "silu" else GELU_TANH
    ups = [pack_bf16(weight, None, number) for weight in gate_up]
    return NativeExperts.of(ups, [pack_bf16(weight) for weight in down], first, top_k), gate_up, down


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_experts", [8, 12, 60])
@pytest.mark.parametrize("corrected", [False, True])
def test_it_routes_as_the_reference(isa: str, routing: Routing, num_experts: int, corrected: bool) -> None:
    logits = random(9, 2 * num_experts)[:, :num_experts]
    correction = random(num_experts, seed=1) if corrected else None
    chosen, weights = NativeRouting.of(routing, num_experts, correction).choose(logits)
    expected, expected_weights = reference_route(logits, routing, correction)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("groups", [1, 3])
def test_logits_that_are_no_numbers_choose_experts_that_there_are(isa: str, groups: int) -> None:
    logits = torch.full((2, 6), torch.nan)
    logits[1] = -torch.inf
    chosen, _ = NativeRouting.of(Routing(2, num_groups=groups), 6, None).choose(logits)
    assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 90, slow(2500)])
def test_they_are_weighted_sums(isa: str, num_tokens: int, first: int, gate: str) -> None:
    """Of those that are here: the last ones are another rank's, and so are the first where others come first."""
    x = random(num_tokens, SIZE).bfloat16()
    chosen, weights = reference_route(random(num_tokens, 12, seed=3), Routing(3, renormalize=True))
    layer, gate_up, down = made(first, 3, gate)
    expected = reference_experts(x, gate_up, down, chosen, weights, first, form_of(gate))
    torch.testing.assert_close(layer.apply(x, chosen, weights), expected, rtol=2e-2, atol=2e-2)


def test_numbers_of_experts_multiply_their_weights(isa: str) -> None:
    logits, factors = random(9, 12), random(12, seed=1)
    routing = Routing(3, renormalize=True, scale=1.5)
    chosen, weights = NativeRouting.of(routing, 12, None, factors).choose(logits)
    expected, plain = reference_route(logits, routing, None)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, plain * factors[expected.long()])


@pytest.mark.parametrize("num_tokens", [1, 5, 90])
@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_of_inputs(isa: str, num_tokens: int, top_k: int) -> None:
    """Each choice is a token of its own, whose weight is in its inputs."""
    x = random(num_tokens, SIZE).bfloat16()
    chosen, weights = reference_route(random(num_tokens, COUNT, seed=3), Routing(top_k, sigmoid=True))
    plain, gate_up, down = made(0, top_k)
    ups = [pack_bf16(weight, None, SILU) for weight in gate_up]
    downs = [pack_bf16(weight) for weight in down]
    found = NativeExperts.of(ups, downs, 0, top_k, weighs_inputs=True).apply(x, chosen, weights)
    inputs = (x[:, None] * weights[..., None]).bfloat16().flatten(0, 1)
    ones = torch.ones(num_tokens * top_k, 1)
    parts = reference_experts(inputs, gate_up, down, chosen.reshape(-1, 1), ones, 0, form_of("silu"))
    expected = parts.view(num_tokens, top_k, -1).sum(1)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(found, plain.apply(x, chosen, weights))


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_gates_with_a_clamp_and_biases(isa: str, num_tokens: int) -> None:
    x = random(num_tokens, SIZE).bfloat16()
    chosen, weights = reference_route(random(num_tokens, COUNT, seed=3), Routing(3, renormalize=True))
    _, gate_up, down = made(0, 3)
    form = ExpertForm(
        clamp=(1.7, 0.4), gate_up_bias=random(COUNT, 2 * INNER).bfloat16(), down_bias=random(COUNT, SIZE).bfloat16()
    )
    ups, downs = (
        [pack_bf16(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        for weights, biases in ((gate_up, form.gate_up_bias), (down, form.down_bias))
    )
    layer = NativeExperts.of(ups, downs, 0, 3, form.clamp)
    expected = reference_experts(x, gate_up, down, chosen, weights, 0, form)
    torch.testing.assert_close(layer.apply(x, chosen, weights), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_alone_equals_the_token_in_any_company(isa: str, threads: int) -> None:
    """Also among so many that they go through the experts in several turns."""
    num_tokens = 1100
    x = random(num_tokens, SIZE).bfloat16()
    chosen, weights = reference_route(random(num_tokens, COUNT, seed=3), Routing(2))
    layer, _, _ = made(0, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = layer.apply(x, chosen, weights)
        for begin, end in ((0, 1), (1099, 1100), (3, 5), (1000, 1060)):
            part = slice(begin, end)
            assert torch.equal(layer.apply(x[part], chosen[part], weights[part]), together[part])
    finally:
        torch.set_num_threads(before)
