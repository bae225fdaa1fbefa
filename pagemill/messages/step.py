"""The seam engine <-> worker: one step's work down, its sampled tokens up.

The scheduler gives each running request a slot, a small integer that stays the request's until it is released.
A step names slots in arrays, so a request that merely decodes one more token costs an array element and no object.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagemill.messages.extensions import StepAnswers, StepPayloads
from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]

NO_TOKEN = -1
"""In place of a sampled token, where a slot's logits are no distribution: one of them is NaN, or the largest is not
finite. Its request ends with an error; no other row is touched."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """First time on the workers, or resumed after a preemption: full state of a slot."""

    request_id: str
    slot: int
    token_ids: Int32Array
    """Prompt plus every token generated so far."""
    num_prompt_tokens: int
    """The client's prompt; generated tokens follow it in token_ids."""
    num_computed_tokens: int
    """Tokens whose keys and values are in the blocks already (a prefix-cache hit)."""
    block_ids: tuple[list[int], ...]
    """One list per KV group, for all tokens of this step included."""
    params: SamplingParams | PoolingParams
    scores_prompt: bool = False
    """Whether `KnownLogprobs` are to be made of the prompt, of which nothing is computed yet."""
    scores_from: int | None = None
    """Position of the first token of the output of which, and of all known ones after it, `KnownLogprobs` are to be
    made; the token before it is not computed yet. None: of none."""
    cache_salt: str | None = field(default=None, repr=False)
    """Requests with different ones learn nothing of each other, on the workers neither."""


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """Blocks appended to a slot's table this step; one list per KV group, any of them may be empty."""

    slot: int
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens of a running slot that the engine knows without the model: forced by a grammar, or replayed.

    They take the place of what was sampled for `position` and for all positions after it. What steps in flight sample
    for the slot is void, on the workers as in the engine; so are the slot's drafts. Of a slot that asks for
    log-probabilities, `KnownLogprobs` are made of these tokens.
    """

    slot: int
    position: int
    """Of the first of them, in the slot's prompt and output."""
    num_computed: int
    """Tokens of the slot that count as computed, where more are: at most `position`, and one less where `KnownLogprobs`
    are made, which need what the token before becomes."""
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Everything the workers need for one step. Valid in full in every mode.

    Order of application: `released`, then `extensions`, then `new`, then `grown`, then `known`, then the batch itself.
    The workers advance a slot's count of computed tokens by `num_tokens` after the step; the scheduler does the same.
    Both take back from that the drafts that were not accepted, and those that were thought of and did not exist.
    """

    step_id: int
    slots: Int32Array
    """[R] slots that run this step, in batch order, each once."""
    num_tokens: Int32Array
    """[R] tokens to run for each of them, > 0. What a slot that samples has beyond its tokens is room for drafts, of
    which it runs no more than it has."""
    new: list[NewRequest] = field(default_factory=list)
    grown: list[SlotBlocks] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Slots whose request finished, was aborted or was preempted since the last step."""
    known: list[KnownTokens] = field(default_factory=list)
    """Of slots that run, in this step or a later one; each slot once."""
    extensions: StepPayloads | None = None
    """What step extensions say to the workers; None where none has anything to say."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that slots propose to follow their last sampled one, for their next step to verify. The slots of the
    workers own them: the engine schedules them, shows them to grammars, and never changes them."""

    counts: Int32Array
    """[L] drafts of each slot that sampled, >= 0. A slot keeps to its count until the next output names another: steps
    that are scheduled ahead of that reserve room for as many."""
    token_ids: Int32Array
    """[sum of counts] slot after slot."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of sampled tokens, of the slots that ask for them."""

    indices: Int32Array
    """[K] which of the step's tokens (`ModelRunnerOutput.token_ids`) they are of, ascending; all tokens of a slot, or
    none."""
    logprobs: TokenLogprobs
    """[K] with as many candidates as the slot that asks for most has; what a slot did not ask for says nothing."""


@dataclass(frozen=True, slots=True)
class KnownLogprobs:
    """Log-probabilities of tokens that nobody sampled, which one step has computed: of a part of a prompt, or of tokens
    that a grammar forced."""

    request_id: str
    start: int
    """Position of the first of them, in prompt and output. There is none for the prompt's first token."""
    logprobs: TokenLogprobs
    """Of the tokens at `start` and after it."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step sampled. Slots whose prompt is not yet complete (a prefill chunk) sample nothing."""

    step_id: int
    slots: Int32Array
    """[L] slots that sampled, in batch order."""
    token_ids: Int32Array
    """[N] the sampled tokens, slot after slot; 0 where something else was made of it, NO_TOKEN where there was none to
    sample. The workers go on with token 0 in that slot: steps that are scheduled already may still run it."""
    vectors: npt.NDArray[np.float32] | None = None
    """[N, W] of a pooling engine, whose requests all end with this; what lies behind a request's `width` is 0."""
    row_counts: Int32Array | None = None
    """[L] how many of them are of each slot; None: one each, L = N."""
    counts: Int32Array | None = None
    """[L] tokens of each slot: one, and one for each draft that was accepted. None: one each, L = N."""
    verified: Int32Array | None = None
    """[L] drafts that each slot verified, accepted or not. None: none."""
    drafts: Drafts | None = None
    """None where no slot has any."""
    answers: StepAnswers | None = None
    """What step extensions answer to the engine; None where none does."""
    logprobs: SampledLogprobs | None = None
    """None where no slot asks for them."""
    known_logprobs: tuple[KnownLogprobs, ...] = ()
    """Of slots that computed what comes before such tokens and ask for them, whether or not they sampled."""
