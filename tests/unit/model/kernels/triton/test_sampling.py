"""Sampling in Triton against the host's sampler: the same tokens from the same logits, seeds and positions."""

import numpy as np
import pytest
import torch

from pagemill.worker.sampling.filters import min_p_, top_k_top_p_
from pagemill.worker.sampling.philox import uniform
from pagemill.worker.sampling.sampler import _invert
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from pagemill.model.kernels.triton import sampling  # isort: skip

ASKED = [
    # temperature, top_p, min_p, top_k
    (1.0, 1.0, 0.0, 0),
    (1.0, 0.95, 0.0, 50),
    (0.8, 0.9, 0.0, 0),
    (3.0, 0.99, 0.0, 0),
    (1.0, 1.0, 0.05, 0),
    (1.5, 0.7, 0.1, 0),
    (1.0, 0.8, 0.02, 20),
    (1.0, 1.0, 0.0, 1),
    (2.0, 0.5, 0.0, 700),
    (1.0, 1.0, 1.0, 0),
    (1.0, 1e-6, 0.0, 0),
    (0.0, 1.0, 0.0, 0),
]
"""Temperature 0: greedy."""


def settings_of(asked: list[tuple[float, float, float, int]], seeds: np.ndarray) -> torch.Tensor:
    rows = np.zeros((len(asked), sampling.NUM_SETTINGS), np.int32)
    for row, (temperature, top_p, min_p, top_k) in enumerate(asked):
        rows[row, :3] = np.array([temperature or 1.0, top_p, min_p], np.float32).view(np.int32)
        rows[row, 3:5] = top_k, temperature == 0
    rows[:, 5:] = seeds.view(np.int32).reshape(-1, 2)
    return torch.from_numpy(rows).to(DEVICE)


def on_the_host(logits: torch.Tensor, asked, seeds: np.ndarray, positions: np.ndarray) -> list[int]:
    logits = logits.cpu().clone()
    likeliest = logits.argmax(-1)
    temperature, top_p, min_p, top_k = (torch.tensor(column) for column in zip(*asked, strict=True))
    greedy = temperature == 0
    logits /= torch.where(greedy, 1.0, temperature.float()).unsqueeze(1)
    min_p_(logits, min_p.float())
    top_k_top_p_(logits, top_k.long(), top_p.float())
    drawn = torch.from_numpy(_invert(logits, torch.from_numpy(uniform(seeds, positions)))).long()
    return torch.where(greedy, likeliest, drawn).tolist()


def both(logits: torch.Tensor, asked, seed: int = 0) -> tuple[list[int], list[int]]:
    random = np.random.default_rng(seed)
    seeds = random.integers(0, 2**64, len(asked), np.uint64)
    positions = random.integers(0, 2**40, len(asked), np.int64)
    copy = logits.clone()
    tokens = sampling.sample(logits, settings_of(asked, seeds), torch.from_numpy(positions).to(DEVICE))
    assert torch.equal(logits, copy)
    return tokens.tolist(), on_the_host(logits, asked, seeds, positions)


def logits_of(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    random = torch.randn((num_rows, vocab_size + 5), generator=torch.Generator().manual_seed(seed)) * scale
    return random.to(DEVICE)[:, :vocab_size]


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "scale"), [slow(7, 1.0), slow(128, 0.01), (1000, 5.0), slow(2500, 1.0)])
def test_tokens_are_the_hosts(vocab_size: int, scale: float):
    tokens, expected = both(logits_of(len(ASKED), vocab_size, scale), ASKED, seed=vocab_size)
    assert tokens == expected


def in_small_parts(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Rows of a thousand logits are cut and listed as those of a large vocabulary are."""
    small = {"_PART": 128, "_PART_TILE": 32, "_SAMPLE": 256, "_LISTED": 2048}
    narrow = {"_MAX_CANDIDATES": 40, "_NUCLEUS_GROUPS": 3, "_RANKED": 10}
    for name, size in (small | narrow | sizes).items():
        monkeypatch.setattr(sampling, name, size)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.02, slow(0.5), slow(1.5), slow(4.0)])
def test_rows_of_many_parts(scale: float, monkeypatch: pytest.MonkeyPatch):
    in_small_parts(monkeypatch)
    tokens, expected = both(logits_of(len(ASKED), 1500, scale), ASKED, seed=1)
    assert tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"_LISTED": 64}, slow({"_LISTED": 256}), slow({"_MAX_CANDIDATES": 2000})])
def test_rows_for_which_there_is_no_room_are_read_in_full(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    in_small_parts(monkeypatch, **sizes)
    for scale in (0.5, 4.0):
        tokens, expected = both(logits_of(len(ASKED), 1500, scale), ASKED, seed=1)
        assert tokens == expected


@pytest.mark.slow
def test_a_sample_that_misleads_costs_time_only(monkeypatch: pytest.MonkeyPatch):
    """What is likely lies where the sample does not look."""
    in_small_parts(monkeypatch)
    logits = logits_of(len(ASKED), 1500, 0.3)
    places = torch.arange(1500, device=DEVICE)
    sampled = torch.isin(
        places, (torch.arange(32) * 1500 // 32 // 8 * 8)[:, None].add(torch.arange(8)).view(-1).to(DEVICE)
    )
    logits[:, ~sampled] += 3.0
    tokens, expected = both(logits, ASKED, seed=5)
    assert tokens == expected


@pytest.mark.slow
def test_top_p_of_fewer_tokens_than_top_k():
    """min-p has left few: their mass is what top-p is measured against."""
    asked = [(1.0, 0.7, 0.02, 500)] * 32
    tokens, expected = both(logits_of(32, 1000, 3.0), asked, seed=3)
    assert tokens == expected


@pytest.mark.slow
def test_masked_logits_are_never_drawn():
    logits = torch.full((len(ASKED), 700), -torch.inf, device=DEVICE)
    logits[:, [3, 300, 690]] = torch.tensor([1.0, 2.0, 0.5], device=DEVICE)
    tokens, expected = both(logits, ASKED)
    assert tokens == expected
    assert set(tokens) <= {3, 300, 690}


@pytest.mark.slow
def test_rows_that_are_no_distribution_have_no_token_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch):
    in_small_parts(monkeypatch)
    logits = logits_of(2 * len(ASKED), 300, 2.0)
    seeds, positions = (
        np.zeros(2 * len(ASKED), np.uint64),
        torch.zeros(2 * len(ASKED), dtype=torch.int64, device=DEVICE),
    )
    settings = settings_of(ASKED * 2, seeds)
    sound = sampling.sample(logits, settings, positions).tolist()
    for row, bad in zip(range(0, len(sound), 2), [torch.nan, -torch.inf, torch.inf] * len(sound), strict=False):
        logits[row, slice(None) if bad == -torch.inf else 200] = bad
    tokens = sampling.sample(logits, settings, positions).tolist()
    assert tokens[::2] == [-1] * len(ASKED)
    assert tokens[1::2] == sound[1::2]


def test_settings_by_slot_into_a_given_tensor():
    logits = logits_of(2, 500, 2.0)
    seeds = np.arange(len(ASKED), dtype=np.uint64)
    settings, slots = settings_of(ASKED, seeds), torch.tensor([4, 11], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([9, 10], device=DEVICE)
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    assert sampling.sample(logits, settings, positions, slots, out) is out
    assert out.tolist() == sampling.sample(logits, settings[slots.long()], positions).tolist()


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    logits = logits_of(len(ASKED), 900, 2.0)
    seeds = np.full(len(ASKED), 11, np.uint64)
    settings, positions = settings_of(ASKED, seeds), torch.arange(len(ASKED), device=DEVICE)
    together = sampling.sample(logits, settings, positions).tolist()
    for row in range(1, len(ASKED), 5):
        part = slice(row, row + 1)
        assert sampling.sample(logits[part], settings[part], positions[part]).tolist() == together[part]
