"""What users get back: `RequestOutput` with one `CompletionOutput` per completion."""

from dataclasses import dataclass, field


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
