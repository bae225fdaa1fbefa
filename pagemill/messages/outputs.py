"""What users get back: `RequestOutput` with one `CompletionOutput` per completion; `PoolingRequestOutput`: a vector;
`ScoringRequestOutput`: the likeness of two texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    """Its log-probability, or whatever `logprobs_mode` says."""
    rank: int | None = None
    """1: it was the most likely; None: not known."""
    decoded_token: str | None = None
    """Its text alone; U+FFFD for parts of a character."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt. In DELTA outputs, text and token_ids hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """None while running; then stop, length, repetition, abort or error."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; `repetition_detected` for a repetition; None for end-of-sequence
    and for other reasons."""
    error: str | None = None
    """What went wrong, when finish_reason is error and it is known."""
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """Per token of token_ids: by token id, its own and then those of its candidates. None unless asked for."""
    cumulative_logprob: float | None = None
    """The sum of the tokens' own log-probabilities, of all tokens so far; None unless asked for."""
    num_draft_tokens: int = 0
    """Drafts that steps have verified which made token_ids; 0 without speculative decoding."""
    num_accepted_tokens: int = 0
    """Of token_ids, those that were drafts."""

    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of one request, as text."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Per token of the prompt, as in `CompletionOutput`; None for the first, before which there is nothing. None unless
    asked for, and until the prompt is computed."""


@dataclass(slots=True)
class PoolingOutput:
    """What was made of a prompt."""

    data: npt.NDArray[np.float32]
    """[D], or [n, D] where something is made of each token; empty unless finish_reason is stop."""
    finish_reason: str = "stop"
    """stop, abort or error."""
    error: str | None = None
    """What went wrong, when finish_reason is error and it is known."""

    @property
    def embedding(self) -> list[float]:
        """As a list of numbers."""
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def probs(self) -> list[float]:
        """Of a model that classifies: the probability of each class, as a list of numbers."""
        return self.embedding

    @property
    def num_classes(self) -> int:
        """Of a model that classifies."""
        return int(self.data.shape[-1])


@dataclass(slots=True)
class PoolingRequestOutput:
    """A pooling request, finished."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How like each other two prompts are."""

    score: float
    """What a model says that scores pairs; of another the cosine of the angle between their vectors, -1 to 1, or, where
    it makes vectors of tokens, the sum of the largest such cosine of each token of the first."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of prompts, compared."""

    request_id: str
    """Those of the two requests, with an underscore between them."""
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of the first prompt, then of the second."""
    finished: bool = True
    num_cached_tokens: int = 0
    """Tokens of both that were found in the prefix cache."""
