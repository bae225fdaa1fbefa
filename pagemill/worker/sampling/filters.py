"""min-p, top-k and top-p as thresholds on the logits. No full sort unless a distribution is almost flat.

A token is kept when its logit is at least the row's threshold, so ties are kept together and the result of a row
does not depend on what else is in the batch.
"""

import torch
from torch import Tensor

_CANDIDATES = 1024
"""Most likely tokens looked at first; distributions that need more are sorted in full."""


def min_p_(logits: Tensor, min_p: Tensor) -> None:
    """Drop tokens less likely than min_p times the most likely one, in place. logits [L, V] float32, min_p [L]."""
    limit = logits.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)
    logits.masked_fill_(logits < limit, -torch.inf)


def top_k_top_p_(logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Keep the top_k most likely tokens and of these the smallest set that reaches top_p, in place.

    logits [L, V] float32; top_k [L] int64, 0 for no limit; top_p [L] float32, 1 for no limit.
    """
    vocab_size = logits.shape[1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    bounded = top_k[top_k < vocab_size]
    width = min(vocab_size, max(_CANDIDATES, int(bounded.max()) if len(bounded) else 0))
    thresholds, settled = _thresholds(logits, top_k, top_p, width)
    if not bool(settled.all()):
        rows = (~settled).nonzero().squeeze(1)
        thresholds[rows] = _thresholds(logits[rows], top_k[rows], top_p[rows], vocab_size)[0]
    logits.masked_fill_(logits < thresholds.unsqueeze(1), -torch.inf)


def _thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The least kept logit of each row [L], and whether `width` candidates were enough to know it [L]."""
    values = logits.topk(width, sorted=True).values
    vocab_size = logits.shape[1]
    in_top_k = torch.arange(width) < top_k.unsqueeze(1)
    # The mass that top-p is measured against: what top-k keeps, or the whole row.
    kept = values.masked_fill(~in_top_k, -torch.inf)
    log_mass = torch.where(top_k < vocab_size, kept.logsumexp(-1), logits.logsumexp(-1))
    probs = (kept - log_mass.unsqueeze(1)).exp()
    before = probs.cumsum(-1) - probs
    keep = in_top_k & ((before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1.0))
    keep[:, 0] = True
    num_kept = keep.sum(-1)
    thresholds = values.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    unlimited = (top_k >= vocab_size) & (top_p >= 1.0)
    thresholds = torch.where(unlimited, -torch.inf, thresholds)
    settled = unlimited | (num_kept < width) | (top_k <= width) | (width == vocab_size)
    return thresholds, settled
