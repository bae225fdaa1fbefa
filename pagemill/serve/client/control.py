"""`EngineControl`: what an operator asks of the engines, and tells them. Does not know how they are reached."""

from collections.abc import Mapping

from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.interface import EngineClient


class EngineControl:
    """All engines of one client. Calls raise EngineDeadError when none can be reached."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def stats(self) -> Mapping[int, SchedulerStats]:
        """The latest figures of each engine, by index. Never waits."""
        return self._client.stats()

    async def pause(self) -> None:
        """Begin no further step: requests stay as they are, and new ones wait."""
        await self._client.call("pause")

    async def resume(self) -> None:
        """Go on."""
        await self._client.call("resume")

    async def is_paused(self) -> bool:
        """Whether all of them are paused; one that was started again is not."""
        return bool(await self._client.call("is_paused"))
