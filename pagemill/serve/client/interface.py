"""`EngineClient`: the front end's whole view of an engine core."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest, EngineReady
from pagemill.messages.stats import SchedulerStats


class EngineClient(Protocol):
    """One engine, or several that look like one. Used from one event loop."""

    ready: EngineReady
    num_engines: int
    """Those that are down included."""

    async def add(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine. Raises EngineDeadError."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; no further output comes for them."""

    async def outputs(self) -> list[EngineCoreOutputs]:
        """The batches of outputs that are there, oldest first; waits while there are none. Raises EngineDeadError."""

    async def call(self, name: str, *args: Any) -> Any:
        """A rare call by name."""

    def stats(self) -> Mapping[int, SchedulerStats]:
        """The latest figures of each engine, by index. Never waits."""

    def problem(self) -> str | None:
        """What keeps requests from being worked on as they should; None when nothing does. Never waits."""

    def accepts(self) -> bool:
        """Whether a new request would be worked on now. Never waits."""

    async def close(self) -> None:
        """Shut the engine down."""


class EngineConnection(EngineClient, Protocol):
    """One connection to one engine. Everything raises EngineDeadError once it is lost, which says nothing about the
    engine; it is then closed, and another is made."""

    async def connected(self) -> None:
        """Returns when the engine has answered. Raises EngineDeadError when it does not in time, or refuses."""
