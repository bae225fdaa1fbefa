"""Sampling on the device by tensors alone: the same order, thresholds and noise as `Sampler`, and nothing that waits.

One captured graph serves all batches of a size, whatever its rows ask for. A kernel where there is one, else plain
torch. Knows no requests.
"""

import torch
from torch import Tensor

from pagemill.model.kernels.ops import argmax, sample_rows, samples_rows
from pagemill.model.kernels.reference import token_or_none
from pagemill.worker.batch.device_states import SamplingColumns
from pagemill.worker.sampling.draft_draws import draw_with_drafts

_LOW = 0xFFFF_FFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def sample_greedy(logits: Tensor) -> Tensor:
    """[L, V] -> [L] the most likely tokens; -1 for a row that is no distribution."""
    return argmax(logits)


def sample_random(logits: Tensor, settings: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """[L, V] float32 (may be changed), `DeviceStates.sampling`, [L] int32 slots and [L] int64 positions of the tokens
    to be sampled -> [L] int64. Rows that are greedy get their most likely token; rows that are
    no distribution -1."""
    if samples_rows(logits):
        return sample_rows(logits, settings, positions, slots)
    columns = SamplingColumns(settings.index_select(0, slots))
    likeliest = argmax(logits)
    filter_rows_(logits, columns)
    return likeliest.where(columns.greedy != 0, _drawn(logits, uniform(columns, positions)))


def sample_with_drafts(logits: Tensor, settings: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
    """As `sample_random`, by exact rejection sampling in rows that have a draft: [L] int64 `drafts`, negative where
    there is none. Greedy rows get their most likely token, draft or not."""
    columns = SamplingColumns(settings.index_select(0, slots))
    likeliest = argmax(logits)
    filter_rows_(logits, columns)
    numbers = uniform(columns, positions)
    drawn = torch.where(drafts < 0, _drawn(logits, numbers), draw_with_drafts(logits, numbers, drafts.clamp(min=0)))
    return likeliest.where(columns.greedy != 0, drawn)


def _drawn(logits: Tensor, numbers: Tensor) -> Tensor:
    """[L, V] of which filters have taken what may not be drawn, [L] float64 in (0, 1) -> [L] tokens."""
    cumulative = logits.softmax(-1).to(torch.float64).cumsum(-1)
    targets = (numbers * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    return token_or_none(logits, tokens)


def filter_rows_(logits: Tensor, columns: SamplingColumns) -> None:
    """Divide [L, V] float32 logits by their rows' temperatures, then drop what min-p, top-k and top-p leave out, in
    place."""
    logits.div_(columns.temperature.unsqueeze(1))
    limit = logits.amax(-1, keepdim=True) + columns.min_p.log().unsqueeze(1)
    logits.masked_fill_(logits < limit, -torch.inf)
    thresholds = _thresholds(logits, columns.top_k.long(), columns.top_p)
    logits.masked_fill_(logits < thresholds.unsqueeze(1), -torch.inf)


def uniform(columns: SamplingColumns, positions: Tensor) -> Tensor:
    """[L] float64 in (0, 1): the numbers of philox.py, for stream 0."""
    zeros = torch.zeros_like(positions)
    c0 = positions & _LOW
    c1 = (positions >> 32) & _LOW
    c2 = zeros
    c3 = zeros
    k0 = columns.seed_low.long() & _LOW
    k1 = columns.seed_high.long() & _LOW
    for _ in range(_ROUNDS):
        # Products have 64 bits; as signed numbers they wrap around to the same bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return (c0.to(torch.float64) + 0.5) * 2.0**-32


def _thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[L] the least logit that top-k and top-p keep of each row."""
    vocab_size = logits.shape[1]
    values = logits.sort(dim=-1, descending=True).values
    limits = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    in_top_k = torch.arange(vocab_size, device=logits.device) < limits
    probs = values.masked_fill(~in_top_k, -torch.inf).softmax(-1)
    keep = in_top_k & ((probs.cumsum(-1) - probs < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1.0))
    last = (keep.sum(-1) - 1).clamp_(min=0)
    return values.gather(1, last.unsqueeze(1)).squeeze(1)
