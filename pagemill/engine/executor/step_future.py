"""`StepFuture`: a step's tokens, fetched by the thread that asks for them. Knows nothing about where they come from."""

from collections.abc import Callable
from concurrent.futures import Future

from pagemill.messages.step import ModelRunnerOutput


class StepFuture(Future[ModelRunnerOutput]):
    """A future that fetches its result when it is asked for it.

    `resolve(future, timeout_s)` waits up to `timeout_s` seconds (None: as long as a step may take) and sets the result
    or the exception; it may do neither when the time is up.
    """

    def __init__(self, resolve: "Callable[[StepFuture, float | None], None]") -> None:
        super().__init__()
        self._resolve = resolve

    def is_resolved(self) -> bool:
        """Whether the result was fetched; does not look for it."""
        return super().done()

    def done(self) -> bool:
        """Whether the result is there."""
        if not super().done():
            self._resolve(self, 0)
        return super().done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """The tokens. Raises EngineDeadError, or TimeoutError after `timeout` seconds."""
        if not super().done():
            self._resolve(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise."""
        if not super().done():
            self._resolve(self, timeout)
        return super().exception(0)
