"""The filters against a plain numpy reading of their definitions."""

import numpy as np
import pytest
import torch

from pagemill.worker.sampling import filters
from pagemill.worker.sampling.filters import min_p_, top_k_top_p_


def reference(row: np.ndarray, top_k: int, top_p: float) -> set[int]:
    order = np.argsort(-row, kind="stable")
    kept = order[:top_k] if top_k else order
    probs = np.exp(row[kept] - row[kept].max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    return set(kept[(before < top_p) | (np.arange(len(kept)) == 0)].tolist()) if top_p < 1 else set(kept.tolist())


def kept_by(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().squeeze(1).tolist()) for row in logits]


@pytest.mark.parametrize("candidates", [4, 1024])
def test_top_k_top_p_matches_the_definition(monkeypatch, candidates):
    monkeypatch.setattr(filters, "_CANDIDATES", candidates)
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (40, 300)).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 50, 299, 300, 1000], 40)
    top_p = rng.choice([0.1, 0.5, 0.9, 0.999, 1.0], 40).astype(np.float32)
    filtered = torch.from_numpy(logits.copy())
    top_k_top_p_(filtered, torch.from_numpy(top_k), torch.from_numpy(top_p))
    wanted = [
        reference(row.astype(np.float64), int(k), float(p)) for row, k, p in zip(logits, top_k, top_p, strict=True)
    ]
    assert kept_by(filtered) == wanted


def test_a_row_is_filtered_the_same_alone_and_in_a_batch():
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(1))
    top_k, top_p = torch.tensor([0, 5, 2000, 0, 1, 40, 0, 3]), torch.tensor([0.3, 1, 0.9, 0.999, 1, 0.5, 1, 0.2])
    together = logits.clone()
    top_k_top_p_(together, top_k, top_p)
    for row in range(8):
        alone = logits[row : row + 1].clone()
        top_k_top_p_(alone, top_k[row : row + 1], top_p[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_equal_logits_at_the_threshold_are_kept_together():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    top_k_top_p_(logits, torch.tensor([2]), torch.tensor([1.0]))
    assert kept_by(logits) == [{1, 2, 3}]


def test_min_p_is_relative_to_the_most_likely():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05]]))
    min_p_(logits, torch.tensor([0.29, 0.0]))
    assert kept_by(logits) == [{0, 1, 2}, {0, 1, 2, 3}]
