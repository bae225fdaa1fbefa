"""`BeamSearchParams`: what a beam search looks for; `BeamSearchOutput`: what it found. Knows no models."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from pagemill.messages.bounds import MAX_INT32, check_integer, check_number

MAX_BEAM_WIDTH: Final = 64
MAX_LENGTH_PENALTY: Final = 100.0


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search. Raises RequestError, a ValueError that names the field, for values out of bounds."""

    beam_width: int
    """Sequences that are followed, and found, 1 to 64."""
    max_tokens: int
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    length_penalty: float = 1.0
    """A sequence scores its log-probability divided by its number of generated tokens to this power, -100 to 100: more
    than 0 favours long ones."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the end-of-sequence token, if that has a text."""

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    """The sum of the log-probabilities of the tokens of the output."""
    score: float
    """That, after the length penalty: what sequences are ordered by."""
    text: str | None = None
    """Of prompt and output; None where there is no tokenizer."""
    finish_reason: str | None = None
    """stop: by an end-of-sequence token; length: `max_tokens`."""
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What was found for one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache before."""
    num_cached_tokens: int = 0
    """Tokens that the steps of the search found in the prefix cache."""
