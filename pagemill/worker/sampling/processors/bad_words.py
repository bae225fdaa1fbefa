"""bad_words: the last token of a sequence is not sampled where the output ends with the tokens before it."""

from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.sampling.processors.per_slot import PerSlotProcessor

_ANY = -2
"""In a prefix, before its first token: anything matches, and nothing too."""


class _Words(NamedTuple):
    """Sequences of tokens, where the logits are: W words, all but the last tokens of the longest M."""

    prefixes: Tensor
    """[W, M] int64; shorter ones end where the longest does."""
    last: Tensor
    """[W] int64."""


class BadWordsProcessor(PerSlotProcessor[_Words]):
    """Keeps the sequences of the slots that have some."""

    reads_tokens = True

    def state_of(self, new: NewRequest, params: SamplingParams) -> _Words | None:
        words = params.bad_words_token_ids
        if not words:
            return None
        longest = max(map(len, words)) - 1
        prefixes = torch.tensor([[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]).long()
        return _Words(self.sent(prefixes), self.sent(torch.tensor([word[-1] for word in words])))

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        words = [self.states[slot] for slot in rows.slots.tolist()]
        longest = max(one.prefixes.shape[1] for one in words)
        generated = self.context.history.last_outputs(rows, longest)
        for row, (prefixes, last) in enumerate(words):
            tail = generated[row, longest - prefixes.shape[1] :]
            matches = ((prefixes == tail) | (prefixes == _ANY)).all(1)
            # Added, not assigned: several words may end with the same token.
            logits[row].index_add_(
                0, last, torch.zeros_like(last, dtype=torch.float32).masked_fill_(matches, -torch.inf)
            )
