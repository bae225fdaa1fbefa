"""`InprocClient`: an engine core in this process, stepped on the event loop's thread while somebody waits for outputs.

For offline batches: no thread, no queue, no copy. Does not know what an engine core is made of.
"""

import asyncio
import gc
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.core_api import CoreApi
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from pagemill.messages.stats import SchedulerStats

logger = get_logger(__name__)


def add_or_report(core: CoreApi, request: EngineCoreRequest) -> list[EngineCoreOutputs]:
    """Add a request to a core. An exception there ends this request alone: it is the one output returned."""
    try:
        core.add(request)
    except Exception as error:
        logger.exception("the engine core refused request %s", request.request_id)
        core.abort([request.request_id])
        return [EngineCoreOutputs(outputs=[EngineCoreOutput.failed(request.request_id, str(error))])]
    return []


class InprocClient:
    """`EngineClient` for a core in this process."""

    num_engines = 1

    def __init__(self, core: CoreApi) -> None:
        self.ready = core.ready
        self._core = core
        self._outputs: list[EngineCoreOutputs] = []
        """Produced and not asked for yet."""
        self._work = asyncio.Event()
        self._closed = False
        self._error: EngineDeadError | None = None

    async def add(self, request: EngineCoreRequest) -> None:
        """Hand a request to the core. Raises EngineDeadError."""
        self._check_alive()
        self._outputs.extend(add_or_report(self._core, request))
        self._work.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; a dead core has none."""
        if self._error is None and not self._closed:
            self._core.abort(request_ids)

    async def outputs(self) -> list[EngineCoreOutputs]:
        """Step until something comes out, and return it. Raises EngineDeadError when a step failed."""
        self._check_alive()
        while not self._outputs:
            if self._core.has_work():
                self._step()
                if not self._outputs:
                    await asyncio.sleep(0)  # others have their turn; with outputs, they have it when these are read
            else:
                self._work.clear()
                await self._work.wait()
        outputs, self._outputs = self._outputs, []
        return outputs

    async def call(self, name: str, *args: Any) -> Any:
        """A rare call by name. Raises EngineDeadError, or what the call raised."""
        self._check_alive()
        result = self._core.call(name, *args)
        self._work.set()  # there may be some again
        return result

    def stats(self) -> Mapping[int, SchedulerStats]:
        """Of the one engine, number 0."""
        return {0: self._core.stats()}

    def problem(self) -> str | None:
        """Why the core cannot work, once it cannot."""
        if self._closed:
            return "the engine was shut down"
        return None if self._error is None else str(self._error)

    def accepts(self) -> bool:
        """Whether the core lives."""
        return self.problem() is None

    async def close(self) -> None:
        """Shut the core down; a second call does nothing."""
        self.stop()

    def stop(self) -> None:
        """`close`, where there is no event loop to wait on."""
        if not self._closed:
            self._closed = True
            self._core.shutdown()
            gc.unfreeze()  # what was frozen at its start (utils/gc_pause.py) may be garbage now

    def _step(self) -> None:
        try:
            self._outputs.extend(self._core.step())
        except EngineDeadError as error:
            self._error = error
            raise
        except Exception as error:
            logger.exception("the engine core died")
            self._error = EngineDeadError(f"the engine core died: {type(error).__name__}")
            raise self._error from error

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineDeadError("the engine was shut down")
