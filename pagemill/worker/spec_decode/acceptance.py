"""When a draft is accepted, by what settings say: how the sampler draws the tokens that drafts are compared with."""

from pagemill.config.speculation import MATCH, SYNTHETIC
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.draft_draws import DraftDraws, conditional_rates, rate_for
from pagemill.worker.spec_decode.interface import Speculation


def draft_draws(speculation: Speculation, states: RequestStates) -> DraftDraws | None:
    """How tokens are drawn where drafts are; None: as anywhere else."""
    if speculation.rejection_sample_method == MATCH:
        return None
    if speculation.rejection_sample_method != SYNTHETIC:
        return DraftDraws(states)
    if speculation.synthetic_acceptance_rates is not None:
        return DraftDraws(states, conditional_rates(speculation.synthetic_acceptance_rates))
    count = speculation.max_drafts
    return DraftDraws(states, (rate_for(speculation.synthetic_acceptance_length or 1.0, count),) * count)
