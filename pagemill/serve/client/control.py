"""`EngineControl`: what an operator asks of the engines, and tells them. Does not know how they are reached."""

import asyncio
from collections.abc import Mapping

from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.interface import EngineClient

POLL_S = 0.05
"""Between two questions whether the engines are done."""


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

    async def finish(self) -> None:
        """Let new requests wait until `resume`, and those in the engines end, however long that takes."""
        await self._client.call("hold")
        while not await self._client.call("is_done"):
            await asyncio.sleep(POLL_S)

    async def resume(self) -> None:
        """Go on."""
        await self._client.call("resume")

    async def is_paused(self) -> bool:
        """Whether all of them are paused."""
        return bool(await self._client.call("is_paused"))
