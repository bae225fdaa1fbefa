"""Tokens that are drawn where a draft is in their place: by rejection sampling, or as often as a test wants.

The draft's probability is moved to the front of the distribution: the part of the uniform number below it accepts the
draft, the rest draws from the residual, which is the distribution without the draft. So one number decides both, and
the token has exactly the distribution that it has without drafts.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.model.kernels.reference import token_or_none
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.philox import uniform

ACCEPT_STREAM = 1
"""Of the noise of a position: whether a draft is accepted that is accepted by chance."""
NO_DRAFT = -1


class DraftDraws:
    """Knows which rows of a step verify drafts. `rates` None: exact rejection sampling; else how often a draft is
    accepted at each place, given that those before it were."""

    def __init__(self, states: RequestStates, rates: Sequence[float] | None = None) -> None:
        self._states = states
        self._rates = None if rates is None else np.array([*rates, 0.0])

    def drafts_of(self, rows: SampledRows) -> npt.NDArray[np.int64] | None:
        """[L] the draft in the place of each row's token, NO_DRAFT where there is none; None: there are none at all.
        Called when the step is computed and none of its tokens is known."""
        states = self._states
        some = rows.positions < states.num_computed[rows.slots]  # those of the last tokens are not computed yet
        if not some.any():
            return None
        places = np.minimum(rows.positions, states.token_ids.shape[1] - 1)
        return np.where(some, states.token_ids[rows.slots, places], NO_DRAFT)

    @property
    def by_chance(self) -> bool:
        """Whether the model has no say in what is accepted."""
        return self._rates is not None

    def accepted(self, rows: SampledRows) -> npt.NDArray[np.bool_] | None:
        """[L] whether chance accepts the draft of each row; None: the distribution decides."""
        if self._rates is None:
            return None
        places = rows.positions - self._states.num_tokens[rows.slots]
        rates = self._rates[np.clip(places, 0, len(self._rates) - 1)]
        found: npt.NDArray[np.bool_] = uniform(self._states.seed[rows.slots], rows.positions, ACCEPT_STREAM) < rates
        return found


def draw_with_drafts(logits: Tensor, uniforms: Tensor, drafts: Tensor, accepted: Tensor | None = None) -> Tensor:
    """Draw one token for each row, of which each has a draft.

    logits: [L, V] float32, of which filters have taken what may not be drawn (-inf); uniforms: [L] float64 in (0, 1);
    drafts: [L] int64, each a token id; accepted: [L] bool, None: a draft is accepted as often as it is drawn. Returns
    [L] int64 token ids, equal to the draft where it is accepted and to no draft where it is not, unless nothing else
    may be drawn; NO_TOKEN for rows that are no distribution. On any device, without waiting for it.
    """
    weights = logits.softmax(-1).to(torch.float64)
    places = drafts.unsqueeze(1)
    of_draft = weights.gather(1, places).squeeze(1)
    residual = weights.scatter(1, places, 0.0).cumsum(-1)
    rest = residual[:, -1]
    if accepted is None:
        targets = uniforms * (of_draft + rest) - of_draft
        accepted = targets < 0
    else:
        targets = uniforms * rest
    accepted = accepted | ~(rest > 0)
    # Rounding must find neither the draft again nor a token without weight behind the last one that has some.
    targets = torch.minimum(targets.clamp(min=0.0), torch.nextafter(rest, torch.zeros_like(rest)))
    drawn = torch.searchsorted(residual, targets.unsqueeze(1), right=True).squeeze(1)
    tokens = torch.where(accepted, drafts, drawn.clamp(max=logits.shape[1] - 1))
    return token_or_none(logits, tokens)


def draft_or_best(logits: Tensor, drafts: Tensor) -> Tensor:
    """[L, V], [L] -> [L, V]: of each row only the draft and the best of the other tokens; -inf elsewhere."""
    places = drafts.unsqueeze(1)
    best = logits.scatter(1, places, -torch.inf).argmax(-1, keepdim=True)
    both = torch.cat([places, best], 1)
    return torch.full_like(logits, -torch.inf).scatter(1, both, logits.gather(1, both))


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """How often drafts are accepted given that those before are, from how often each place is accepted at all: [k]
    numbers that do not rise."""
    return tuple(rate / before if before else 0.0 for rate, before in zip(rates, (1.0, *rates), strict=False))


def rate_for(mean_length: float, num_drafts: int) -> float:
    """The rate of each draft, given that those before are accepted, with which a step of `num_drafts` yields
    `mean_length` tokens on average, 1 to 1 + num_drafts, with the one behind the drafts."""
    low, high = 0.0, 1.0
    for _ in range(60):  # the mean rises with the rate
        middle = (low + high) / 2
        if 1 + sum(middle**place for place in range(1, num_drafts + 1)) < mean_length:
            low = middle
        else:
            high = middle
    return high
