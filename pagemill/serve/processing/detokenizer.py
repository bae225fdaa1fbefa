"""Text of one completion while its tokens arrive: incremental decoding, stop strings, hold-back.
Does not know requests, queues or the engine."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagemill.messages.engine_io import FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.processing.stop_strings import StopMatcher
from pagemill.tokenizers.interface import Tokenizer


class StopMatch(NamedTuple):
    """What ended the text."""

    stop: str
    """The stop string; for another reason, a word for it."""
    num_tokens: int
    """How many of the tokens just appended belong to the completion; later ones are ignored."""
    reason: FinishReason = FinishReason.STOP


class Detokenizer(Protocol):
    """What an output processor asks for. Pieces taken, concatenated, are the text of the completion."""

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """More tokens; what ended the text with one of them, if anything did."""

    def finish(self) -> StopMatch | None:
        """The sequence has ended: nothing is held back any more."""

    def take(self) -> str:
        """The text that became certain since the last call."""


class NoText:
    """For requests that want token ids only."""

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Ignore the tokens."""
        return None

    def finish(self) -> StopMatch | None:
        """Nothing to release."""
        return None

    def take(self) -> str:
        """Always empty."""
        return ""


class PlainText:
    """No stop strings. Decoding waits until somebody takes the text, so a slow reader costs one call, not many."""

    __slots__ = ("_decoder", "_ended", "_pending")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder = tokenizer.incremental(prompt_token_ids, params.skip_special_tokens)
        self._pending: list[int] = []
        self._ended = False

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Keep the tokens for the next `take`."""
        self._pending.extend(token_ids)
        return None

    def finish(self) -> StopMatch | None:
        """Let the next `take` release everything."""
        self._ended = True
        return None

    def take(self) -> str:
        """Decode what is pending."""
        text = ""
        if self._pending:
            text = self._decoder.step(self._pending)
            self._pending = []
        if self._ended:
            self._ended = False
            text += self._decoder.flush()
        return text


class StoppingText:
    """With stop strings. Tokens are decoded as they arrive, because the engine must hear of a stop at once."""

    __slots__ = ("_certain", "_decoder", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._decoder = tokenizer.incremental(prompt_token_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(tuple(params.stop or ()), params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._certain: list[str] = []

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Decode token by token, so that the number of tokens up to the stop string is known."""
        for count, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            stop = self._feed(self._decoder.step((token,)))
            if stop is not None:
                return StopMatch(stop, count)
        return None

    def finish(self) -> StopMatch | None:
        """Release what was held back; bytes that never became a character may still complete a stop string."""
        stop = self._feed(self._decoder.flush())
        if stop is not None:
            return StopMatch(stop, 0)
        self._certain.append(self._matcher.release())
        return None

    def take(self) -> str:
        """What the matcher let through."""
        text = "".join(self._certain)
        self._certain = []
        return text

    def _feed(self, piece: str) -> str | None:
        if not piece:
            return None
        certain, stop = self._matcher.feed(piece, armed=self._num_tokens > self._min_tokens)
        if certain:
            self._certain.append(certain)
        return stop


def make_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    """The cheapest detokenizer that does what the parameters ask for."""
    if not params.detokenize:
        return NoText()
    return (StoppingText if params.stop else PlainText)(tokenizer, prompt_token_ids, params)
