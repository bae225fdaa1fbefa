"""Per-slot state that lives as long as a request. Slots never move; a step gathers from them by index.

Knows nothing about blocks (block_tables.py) and nothing about why a slot was given or taken.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import Int32Array, KnownTokens, NewRequest


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """What native code reads of requests, by slot, and changes; arrays that stay where they are. token_ids [S, N], the
    others [S]."""

    token_ids: Int32Array
    num_tokens: Int32Array
    num_computed: Int32Array
    num_sampled: Int32Array
    processed: npt.NDArray[np.bool_]
    greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: Int32Array
    """0: no limit."""
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]


class RequestStates:
    """Arrays indexed by slot. Every array that `add` writes is written in full for its slot, so that nothing of a
    slot's former request can be seen by the next.

    Shapes: S slots (max_num_seqs), N tokens (max_model_len).
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        """[S, N + 1]; the last token that is sampled needs no room to be computed, but is kept."""
        self.num_tokens = np.zeros(num_slots, np.int32)
        """[S] tokens known: prompt and generated."""
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        """[S] tokens whose keys and values are in the cache."""
        self.num_sampled = np.zeros(num_slots, np.int32)
        """[S] tokens sampled, or to be, since the host last knew all tokens of the slot."""
        self.generation = np.zeros(num_slots, np.int32)
        """[S] grows when what is being sampled for a slot is void: its request is another, or its tokens are."""
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        """[S] 0: no limit."""
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.greedy = np.ones(num_slots, bool)
        self.processed = np.zeros(num_slots, bool)
        """[S] whether a logits processor changes a slot's logits; kept by the `Sampler`."""

    def add(self, new: NewRequest) -> None:
        """Fill a slot with a request's full state."""
        slot = new.slot
        count = len(new.token_ids)
        self.token_ids[slot, :count] = new.token_ids
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.num_computed[slot] = new.num_computed_tokens
        self.num_sampled[slot] = 0
        self.generation[slot] += 1
        if isinstance(new.params, SamplingParams):
            self._set_sampling(slot, new.params)

    def replace(self, known: KnownTokens) -> None:
        """Tokens of a slot that were not sampled, in place of those that were, or will be, from there on."""
        slot = known.slot
        position = known.position
        count = len(known.token_ids)
        self.token_ids[slot, position : position + count] = known.token_ids
        self.num_tokens[slot] = position + count
        self.num_computed[slot] = min(self.num_computed[slot], known.num_computed)
        self.num_sampled[slot] = 0
        self.generation[slot] += 1

    def _set_sampling(self, slot: int, params: SamplingParams) -> None:
        self.greedy[slot] = params.greedy
        self.temperature[slot] = 1.0 if params.greedy else params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF

    def arrays(self) -> SlotArrays:
        """What native code reads and changes."""
        return SlotArrays(
            self.token_ids,
            self.num_tokens,
            self.num_computed,
            self.num_sampled,
            self.processed,
            self.greedy,
            self.temperature,
            self.min_p,
            self.top_k,
            self.top_p,
            self.seed,
        )

    def advance(self, slots: Int32Array, num_tokens: Int32Array) -> None:
        """Count the step's tokens as computed."""
        self.num_computed[slots] += num_tokens

    def append(self, slots: Int32Array, token_ids: npt.NDArray[np.int32]) -> None:
        """Append one sampled token to each slot."""
        self.fill(slots, self.expect(slots), token_ids)

    def expect(self, slots: Int32Array) -> Int32Array:
        """Make room for one sampled token in each slot, which `fill` brings; [L] the tokens' positions."""
        positions = self.num_tokens[slots]
        self.num_tokens[slots] += 1
        self.num_sampled[slots] += 1
        return positions

    def fill(self, slots: Int32Array, positions: npt.NDArray[np.integer], token_ids: npt.NDArray[np.int32]) -> None:
        """The tokens that were expected at these positions; token 0 in place of NO_TOKEN."""
        self.token_ids[slots, positions] = np.maximum(token_ids, 0)
