"""What proposers cost steps that have no drafts: `PYTHONPATH=. python benchmarks/proposers.py [--tokens 2000]`.

Requests get tokens one by one, all at the same time: of texts in which nothing is said twice, and of texts of a few
hundred words in any order, in which ends are found again and what followed them is no guide. Printed is the CPU time
that a step takes for all its requests, from telling what came to knowing what is verified next, in microseconds: the
mean of all but the first quarter, where a step costs nearly as much for each token. No model runs.
"""

import argparse
import time
from statistics import mean

import numpy as np

from pagemill.catalog.proposers import PROPOSERS
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode.drafts import SlotDrafts
from pagemill.worker.spec_decode.interface import ProposerContext, Speculation

TEXTS = {"nothing twice": 1 << 30, "300 words": 300}
"""Different tokens that there are."""
STEP_S, TOKEN_S = 0.001, 0.005
"""What a step is said to cost."""


def microseconds(method: str, num_slots: int, num_words: int, num_tokens: int) -> float:
    """Of a step."""
    rng = np.random.default_rng(0)
    states = RequestStates(num_slots, num_tokens + 16)
    states.token_ids[:] = rng.integers(0, num_words, states.token_ids.shape)
    states.num_tokens[:] = 8
    speculation = Speculation(method, 8)
    proposer = PROPOSERS.resolve(method)(ProposerContext(states, 8, speculation))
    drafts = SlotDrafts(states, proposer, speculation)
    slots = np.arange(num_slots, dtype=np.int32)
    text = states.token_ids.copy()
    found = []
    for _ in range(num_tokens):
        began = time.thread_time()
        drafts.propose(slots)
        found.append(1e6 * (time.thread_time() - began))
        states.token_ids[:] = text
        states.num_tokens += 1
        adaptive = drafts._adaptive
        if adaptive is not None:
            adaptive.costs.add(num_slots, STEP_S + TOKEN_S * num_slots)
            adaptive.costs.add(2 * num_slots, STEP_S + 2 * TOKEN_S * num_slots)
    return mean(found[num_tokens // 4 :])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    print("| text | drafts | 1 request | 8 | 64 |")
    print("| --- | --- | --- | --- | --- |")
    for name, num_words in TEXTS.items():
        for method in ("ngram", "suffix"):
            row = [f"{microseconds(method, count, num_words, args.tokens):.0f}" for count in (1, 8, 64)]
            print(f"| {name} | {method} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
