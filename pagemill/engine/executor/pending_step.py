"""`PendingStep`: a step's tokens, fetched by the thread that asks for them, from wherever an executor says."""

from collections.abc import Callable

from pagemill.messages.step import ModelRunnerOutput


class PendingStep:
    """A `Pending` that fetches its result when it is asked for it. Not thread-safe.

    `fetch(step, wait)` calls `set_result` or `set_error` of the step; with `wait` it always does, and without it only
    when the answer is there already.
    """

    def __init__(self, fetch: "Callable[[PendingStep, bool], None]") -> None:
        self._fetch = fetch
        self._output: ModelRunnerOutput | None = None
        self._error: Exception | None = None

    def set_result(self, output: ModelRunnerOutput) -> None:
        """What the step sampled."""
        self._output = output

    def set_error(self, error: Exception) -> None:
        """Why there will be no tokens."""
        self._error = error

    def is_answered(self) -> bool:
        """Whether the tokens or the error were fetched; does not look for them."""
        return self._output is not None or self._error is not None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        if not self.is_answered():
            self._fetch(self, False)
        return self.is_answered()

    def result(self) -> ModelRunnerOutput:
        """The tokens. Raises EngineDeadError."""
        if not self.is_answered():
            self._fetch(self, True)
        if self._output is None:
            raise self._error or RuntimeError("a step was waited for, and has neither tokens nor an error")
        return self._output
