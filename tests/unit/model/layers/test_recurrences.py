"""Many tokens at once equal one after the other."""

import pytest
import torch

from pagemill.model.layers.recurrences import (
    CHUNK,
    convolve,
    convolve_one,
    delta_scan,
    delta_step,
    dual_scan,
    dual_step,
    selective_scan,
    selective_step,
)

LENGTHS = [1, CHUNK, CHUNK + 7]


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def one_by_one(step, parts, state):
    """`parts`: tensors, or pairs of them, [T, ...] each."""
    outputs = []
    state = state.unsqueeze(0)
    for token in range(len(parts[0])):
        now = [tuple(p[token : token + 1] for p in x) if isinstance(x, tuple) else x[token : token + 1] for x in parts]
        out, state = step(now, state)
        outputs.append(out)
    return torch.cat(outputs), state[0]


def check(found, wanted):
    for ours, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_of_many_tokens_and_of_one():
    x, before, weight, bias = random(9, 5), random(3, 5), random(5, 4), random(5)
    whole = convolve(x, before, weight, bias)
    joined = torch.cat([before, x])
    for token in range(len(x)):
        one = convolve_one(x[token : token + 1], joined[token : token + 3].unsqueeze(0), weight, bias)
        torch.testing.assert_close(whole[token : token + 1], one)


@pytest.mark.parametrize("length", LENGTHS)
def test_selective_state_space(length):
    x, dt, state = random(length, 6), random(length, 6).abs(), random(6, 4)
    bc = (random(length, 4), random(length, 4))
    a = -random(6, 4).abs()
    wanted = one_by_one(lambda now, old: selective_step(now[0], now[1], a, now[2], old), [x, dt, bc], state)
    check(selective_scan(x, dt, a, bc, state), wanted)


@pytest.mark.parametrize("length", LENGTHS)
def test_dual_form_with_groups(length):
    x, dt, state = random(length, 4, 3), random(length, 4).abs(), random(4, 3, 5)
    bc = (random(length, 2, 5), random(length, 2, 5))
    a = -random(4).abs()
    wanted = one_by_one(lambda now, old: dual_step(now[0], now[1], a, now[2], old), [x, dt, bc], state)
    check(dual_scan(x, dt, a, bc, state), wanted)


@pytest.mark.parametrize("length", LENGTHS)
def test_gated_delta_rule(length):
    unit = torch.nn.functional.normalize
    query, key = unit(random(length, 2, 4), dim=-1), unit(random(length, 2, 4), dim=-1)
    value, state = random(length, 2, 3), random(2, 4, 3)
    gates = (-random(length, 2).abs(), random(length, 2).sigmoid())
    wanted = one_by_one(lambda now, old: delta_step(*now, old), [query, key, value, gates], state)
    check(delta_scan(query, key, value, gates, state), wanted)
