"""Draws in the place of a draft: the distribution is that without drafts, or acceptance is as it was asked for."""

import numpy as np
import pytest
import torch

from pagemill.messages.step import NO_TOKEN
from pagemill.worker.sampling.draft_draws import conditional_rates, draft_or_best, draw_with_drafts, rate_for
from pagemill.worker.sampling.philox import uniform

COUNT = 200_000


def noise(count=COUNT, seed=5):
    return torch.from_numpy(uniform(np.full(count, seed, np.uint64), np.arange(count)))


def drawn(probs, draft, accepted=None):
    """How often each token is drawn."""
    logits = torch.tensor(probs).log().expand(COUNT, -1)
    taken = None if accepted is None else accepted
    tokens = draw_with_drafts(logits, noise(), torch.full((COUNT,), draft), taken)
    return torch.bincount(tokens, minlength=len(probs)).numpy()


@pytest.mark.parametrize("draft", range(6))
def test_the_distribution_is_that_without_drafts(draft):
    probs = np.array([0.5, 0.02, 0.25, 0.0, 0.13, 0.1])
    found = drawn(probs.tolist(), draft)
    assert found[3] == 0, "a token that filters have taken is never drawn, even as a draft"
    expected = probs[probs > 0] * COUNT
    statistic = (((found[probs > 0] - expected) ** 2) / expected).sum()
    assert statistic < 20.5  # of 4 degrees of freedom: exceeded once in 2,500 times


def test_a_draft_is_accepted_as_often_as_it_is_likely():
    logits = torch.tensor([0.3, 0.7]).log().expand(COUNT, -1)
    tokens = draw_with_drafts(logits, noise(), torch.zeros(COUNT, dtype=torch.int64))
    assert abs(float((tokens == 0).double().mean()) - 0.3) < 0.005
    sure = draw_with_drafts(
        torch.tensor([[0.0, -torch.inf]]).expand(9, -1), noise(9), torch.zeros(9, dtype=torch.int64)
    )
    assert sure.tolist() == [0] * 9


def test_chance_accepts_and_the_residual_is_drawn_otherwise():
    probs = [0.6, 0.1, 0.3]
    assert drawn(probs, 1, torch.ones(COUNT, dtype=torch.bool)).tolist() == [0, COUNT, 0]
    found = drawn(probs, 0, torch.zeros(COUNT, dtype=torch.bool))
    assert found[0] == 0
    assert abs(found[1] / COUNT - 0.25) < 0.005


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_no_token_of_no_distribution(bad):
    assert draw_with_drafts(torch.tensor([bad]), noise(1), torch.tensor([1])).tolist() == [NO_TOKEN]


def test_the_largest_noise_finds_a_token_that_has_weight():
    logits = torch.full((2, 50_000), -torch.inf)
    logits[:, 1:40_000] = torch.rand(39_999, generator=torch.Generator().manual_seed(1)) * 8
    last = torch.tensor([1 - 2.0**-33, 2.0**-33], dtype=torch.float64)
    tokens = draw_with_drafts(logits, last, torch.tensor([39_999, 39_998]))
    assert tokens.tolist() != [39_999, 39_998]
    assert (logits.gather(1, tokens.unsqueeze(1)) > -torch.inf).all()


def test_of_a_greedy_row_the_draft_or_the_best_other_token():
    found = draft_or_best(torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]), torch.tensor([1, 0]))
    assert found.isfinite().tolist() == [[False, True, True], [True, True, False]]


def test_rates_by_place():
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == (0.8, 0.5, 0.0, 0.0)
    assert rate_for(1.0, 5) == pytest.approx(0.0, abs=1e-9)
    assert rate_for(6.0, 5) == pytest.approx(1.0)
    rate = rate_for(3.0, 5)
    assert 1 + sum(rate**place for place in range(1, 6)) == pytest.approx(3.0)
