"""`CoreLoop`: steps a core, applies the calls of front ends between steps, and addresses what comes out.

Does not know how messages travel: it has a queue to read from and a function to send with.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from pagemill.engine.waves import NoWaves, Waves
from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.core_api import CoreApi
from pagemill.messages.core_calls import (
    AbortRequests,
    AddRequests,
    CallResult,
    CoreCall,
    EngineCall,
    EngineReport,
    FrontEndGone,
    StepOutputs,
)
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from pagemill.messages.stats import SchedulerStats
from pagemill.messages.waves import JoinWaves, RoundDecision, StartWave

logger = get_logger(__name__)


Inbound = tuple[int, EngineCall]
"""A message: the number of the front end's connection over which it came, and the call."""
IDLE_BEFORE_PREPARING_S = 0.05
Send = Callable[[int, EngineReport], None]
"""Sends a report over a connection of a front end. Never blocks."""


class CoreLoop:
    """One thread runs `run`; any thread may put messages into `inbox` and call `stop`.

    `num_steps`, `idle` and `stats` may be read by any thread.
    """

    def __init__(
        self, core: CoreApi, send: Send, waves: Waves | None = None, prepare: Callable[[], bool] | None = None
    ) -> None:
        """`waves` decides when to step (default: whenever there is work). `prepare` does a piece of what later requests
        would wait for, and is called while there is nothing else to do until it returns False."""
        self.inbox: SimpleQueue[Inbound | None] = SimpleQueue()
        self.num_steps = 0
        self.idle = True
        self.stats = SchedulerStats()
        """The core's latest."""
        self._core = core
        self._send = send
        self._waves: Waves = waves or NoWaves(core.has_work)
        self._owners: dict[str, int] = {}
        """Connection of the front end of every request in flight."""
        self._num_owned: Counter[int] = Counter()
        self._stopping = False
        self._failure: EngineDeadError | None = None
        self._prepare = prepare

    def fail(self, error: EngineDeadError) -> None:
        """End `run` with this error, such as the death of a worker while there was nothing to do."""
        self._failure = error
        self.stop()

    def stop(self) -> None:
        """End `run` after the present step."""
        self._stopping = True
        self.inbox.put(None)

    def run(self) -> None:
        """Step the core until `stop`, asleep while there is nothing to do. Raises EngineDeadError when a step fails,
        and what `fail` was given."""
        due = self._waves.due
        while not self._stopping:
            self._read_inbox(wait=not due())
            if due() and not self._stopping:
                self.idle = False
                self._step()
                self.num_steps += 1
        if self._failure is not None:
            raise self._failure

    def _step(self) -> None:
        core = self._core
        # Others wait in the middle of their steps for one of this engine: it takes one also while it waits itself.
        if core.has_work() and not (self._waves.shared and core.only_waits()):
            for outputs in core.step():
                self._deliver(outputs)
        else:
            core.execute_dummy_step()
        self._waves.stepped(core.num_executed)

    def _read_inbox(self, wait: bool) -> None:
        if wait:
            self.idle = True
            message = self._next_message()
            self.idle = False
            self._apply(message)
        while True:
            try:
                message = self.inbox.get_nowait()
            except Empty:
                return
            self._apply(message)

    def _next_message(self) -> Inbound | None:
        while self._prepare is not None:
            try:
                return self.inbox.get(timeout=IDLE_BEFORE_PREPARING_S)
            except Empty:
                if not self._prepare():
                    self._prepare = None
        return self.inbox.get()

    def _apply(self, message: Inbound | None) -> None:
        if message is None:
            return
        sender, call = message
        match call:
            case AddRequests(requests):
                for request in requests:
                    self._add(sender, request)
            case AbortRequests(request_ids):
                self._abort(request_ids)
            case FrontEndGone(index):
                self._abort([request_id for request_id, owner in self._owners.items() if owner == index])
            case CoreCall(call_id, method, args):
                self._send(sender, self._call(call_id, method, args))
            case JoinWaves() | StartWave() | RoundDecision():
                self._waves.on_order(call)

    def _add(self, sender: int, request: EngineCoreRequest) -> None:
        """An exception here ends this request alone."""
        try:
            self._core.add(request)
            self._owners[request.request_id] = sender
            self._num_owned[sender] += 1
        except Exception as error:
            logger.exception("the engine core refused request %s", request.request_id)
            output = EngineCoreOutput.failed(request.request_id, str(error))
            self._send(sender, StepOutputs(EngineCoreOutputs(outputs=[output])))

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._core.abort(request_ids)
        self.stats = self._core.stats()
        for request_id in request_ids:
            self._disown(request_id)

    def _disown(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            self._num_owned[owner] -= 1
            if not self._num_owned[owner]:
                del self._num_owned[owner]

    def _call(self, call_id: int, method: str, args: Sequence[Any]) -> CallResult:
        try:
            return CallResult(call_id, self._core.call(method, *args))
        except Exception as error:
            return CallResult(call_id, error=f"{type(error).__name__}: {error}")

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            sampled = outputs.stats.residency is not None  # said once, and not with every pulse
            self.stats = msgspec.structs.replace(outputs.stats, residency=None) if sampled else outputs.stats
        for owner, part in self._parts(outputs):
            self._send(owner, StepOutputs(part))
        for output in outputs.outputs:
            if output.finish is not None:
                self._disown(output.request_id)

    def _parts(self, outputs: EngineCoreOutputs) -> list[tuple[int, EngineCoreOutputs]]:
        """The share of each front end. With one front end, all of it as it is."""
        if len(self._num_owned) <= 1:
            return [(owner, outputs) for owner in self._num_owned]
        parts: dict[int | None, EngineCoreOutputs] = {
            owner: msgspec.structs.replace(outputs, request_ids=[], token_ids=[], outputs=[])
            for owner in (*self._num_owned, None)  # None: of requests that nobody waits for
        }
        owner_of = self._owners.get
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            part = parts[owner_of(request_id)]
            part.request_ids.append(request_id)
            part.token_ids.append(token_id)
        for output in outputs.outputs:
            parts[owner_of(output.request_id)].outputs.append(output)
        addressed = [
            (owner, part) for owner, part in parts.items() if owner is not None and (part.request_ids or part.outputs)
        ]
        return addressed[:1] + [(owner, _without_figures(part)) for owner, part in addressed[1:]]


def _without_figures(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """A copy without the statistics of the step as a whole: exactly one front end may count them."""
    stats = outputs.stats
    if stats is not None and stats.residency is not None:
        stats = msgspec.structs.replace(stats, residency=None)
    return msgspec.structs.replace(outputs, stats=stats, num_step_tokens=0)
