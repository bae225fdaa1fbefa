"""The protocol that an engine core implements, and that whoever steps it calls."""

from collections.abc import Sequence
from typing import Any, Protocol

from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest, EngineReady
from pagemill.messages.stats import SchedulerStats


class CoreApi(Protocol):
    """What `engine.core.EngineCore` offers; written down here because `serve` never imports `engine`.

    Not thread-safe: one thread calls everything.
    """

    ready: EngineReady
    num_executed: int
    """Steps given to the workers so far."""

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests, in whatever state; unknown ids are ignored. No output follows for them."""

    def step(self) -> list[EngineCoreOutputs]:
        """Take one step; what has become known of earlier steps or this one."""

    def stats(self) -> SchedulerStats:
        """What runs and waits now, and how full the cache is."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def only_waits(self) -> bool:
        """Whether there are requests, and a step would do nothing for any of them yet."""

    def execute_dummy_step(self) -> None:
        """A step of no request, for the workers of other engines that step together with these."""

    def call(self, name: str, *args: Any) -> Any:
        """A rare call by name: reset_prefix_cache."""

    def shutdown(self) -> None:
        """Stop the workers."""
