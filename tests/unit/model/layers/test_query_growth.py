"""Queries that grow with their positions, beside what Llama 4's configuration means."""

import math

import torch

from pagemill.model.layers.query_growth import QueryGrowth


def test_queries_grow_with_the_logarithm_of_their_positions() -> None:
    growth = QueryGrowth(step=16, scale=0.1, max_positions=100)
    positions = torch.tensor([0, 14, 15, 31, 99])
    grown = growth(torch.ones(5, 2, 3), positions)
    wanted = [1 + 0.1 * math.log1p((position + 1) // 16) for position in positions.tolist()]
    torch.testing.assert_close(grown, torch.tensor(wanted)[:, None, None].expand(5, 2, 3))
    assert grown[0, 0, 0] == grown[1, 0, 0] == 1


def test_native_code_has_a_factor_for_each_position() -> None:
    growth = QueryGrowth(step=8, scale=0.5, max_positions=64)
    factors, step = growth.native()
    positions = torch.arange(64)
    assert torch.equal(factors[(positions + 1) // step], growth(torch.ones(64, 1, 1), positions).flatten())
