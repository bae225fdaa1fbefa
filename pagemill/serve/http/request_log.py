"""`RequestLog`: lines about requests for the model, and about what was generated for them.

What a prompt says is logged at level DEBUG only, and what was generated where that is asked for; both are cut. Nothing
is ever shown of keys and salts, nor of texts among the parameters: they are parts of what somebody wrote.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagemill.config.server_logs import ServerLogs
from pagemill.log import get_logger
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.tokenizers.interface import Tokenizer
from pagemill.utils.log_text import one_line

logger = get_logger(__name__)

MAX_PROMPTS = 4
"""Of one request, that are described one by one."""
NO_REASON = "not finished"


class RequestLog:
    """Of one API server."""

    def __init__(self, logs: ServerLogs, tokenizer: Tokenizer) -> None:
        self._logs = logs
        self._tokenizer = tokenizer

    def received(self, request_id: str, path: str, requests: Sequence[PreparedRequest]) -> None:
        """A request that passed every check is about to run."""
        if not self._logs.requests or not requests:
            return
        counts = [len(item.request.prompt_token_ids) for item in requests]
        logger.info(
            "request %s: %s, %d prompts of %d tokens, %s",
            request_id,
            path,
            len(counts),
            sum(counts),
            _described(requests[0].request.params),
        )
        if logger.isEnabledFor(logging.DEBUG):
            for number, item in enumerate(requests[:MAX_PROMPTS]):
                logger.debug("request %s, prompt %d: %s", request_id, number, self._prompt(item))

    def answer(self, request_id: str) -> "AnswerLog | None":
        """For what is generated for a request; None: it is not logged."""
        return AnswerLog(request_id, self._logs) if self._logs.outputs else None

    def _prompt(self, item: PreparedRequest) -> str:
        """Its beginning. No token has less than a character, but for a few at the end of one."""
        ids = item.request.prompt_token_ids
        most = self._logs.max_chars
        text = self._tokenizer.decode(list(ids[:most]), skip_special_tokens=False)
        return one_line(text[:most], most) + ("..." if len(ids) > most or len(text) > most else "")


class AnswerLog:
    """What is generated for one request."""

    def __init__(self, request_id: str, logs: ServerLogs) -> None:
        self._request_id = request_id
        self._logs = logs
        self._texts: dict[tuple[int, int], _Text] = {}
        """Of (prompt, completion) that have not ended."""

    def note(self, prompt_index: int, output: RequestOutput) -> None:
        """Add what an output has to the texts of the request's completions; log those that end with it, and with
        --enable-log-deltas each part."""
        for completion in output.outputs:
            place = (prompt_index, completion.index)
            text = self._texts.setdefault(place, _Text())
            text.add(completion, self._logs.max_chars)
            if completion.finish_reason is not None:
                del self._texts[place]
                self._end(place, text, completion.finish_reason)
            elif self._logs.deltas:
                shown = one_line(completion.text, self._logs.max_chars)
                logger.info("answer %s %d.%d goes on: %s", self._request_id, *place, shown)

    def end(self) -> None:
        """Nothing more comes: what has not ended never will."""
        for place, text in self._texts.items():
            self._end(place, text, NO_REASON)
        self._texts = {}

    def _end(self, place: tuple[int, int], text: "_Text", reason: str) -> None:
        logger.info(
            "answer %s %d.%d ended (%s, %d tokens): %s",
            self._request_id,
            *place,
            reason,
            text.num_tokens,
            one_line(text.beginning, self._logs.max_chars) + text.left_out(),
        )


class _Text:
    """The beginning of what was generated."""

    def __init__(self) -> None:
        self.beginning = ""
        self.num_tokens = 0
        self._num_chars = 0

    def add(self, completion: CompletionOutput, most_chars: int) -> None:
        """Add the tokens that a completion's delta has, and its text while the beginning has fewer than `most_chars`
        characters."""
        self.num_tokens += len(completion.token_ids)
        self._num_chars += len(completion.text)
        room = most_chars - len(self.beginning)
        if room > 0:
            self.beginning += completion.text[:room]

    def left_out(self) -> str:
        """What is said of the rest."""
        left_out = self._num_chars - len(self.beginning)
        return f"... ({left_out} more characters)" if left_out else ""


def _described(params: msgspec.Struct) -> str:
    """What differs from the defaults; of texts, lists and objects only how many there are."""
    found = []
    for field in msgspec.structs.fields(params):
        value = getattr(params, field.name)
        if value != field.default and not (value == () and field.default is None):
            found.append(f"{field.name}={_shown(value)}")
    return ", ".join(found) or "default parameters"


def _shown(value: Any) -> str:
    if isinstance(value, (bool, int, float)) or value is None:
        return str(value)
    return f"<{len(value)}>" if isinstance(value, (str, Sequence, Mapping)) else "<given>"
