"""What users get back: `RequestOutput` with one `CompletionOutput` per completion; `PoolingRequestOutput`: a vector."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt. In DELTA outputs, text and token_ids hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """None while running; then stop, length, abort or error."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for end-of-sequence and for other reasons."""
    error: str | None = None
    """What went wrong, when finish_reason is error and it is known."""

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


@dataclass(slots=True)
class PoolingOutput:
    """What was made of a prompt."""

    data: npt.NDArray[np.float32]
    """[D]; empty unless finish_reason is stop."""
    finish_reason: str = "stop"
    """stop, abort or error."""
    error: str | None = None
    """What went wrong, when finish_reason is error and it is known."""

    @property
    def embedding(self) -> list[float]:
        """As a list of numbers."""
        numbers: list[float] = self.data.tolist()
        return numbers


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
