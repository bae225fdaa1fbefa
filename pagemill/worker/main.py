"""A worker process: executes the commands of an executor until it is told to stop or its parent is gone.

Does not know how the process was started (utils/processes.py), nor what a worker is made of.
"""

import contextlib
import traceback
from collections import deque
from typing import Any

import msgspec

import pagemill.errors
from pagemill.catalog.registry import load_path
from pagemill.config.engine_config import EngineConfig
from pagemill.errors import PagemillError, PeerGoneError, TransportError
from pagemill.log import get_logger, name_process
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput
from pagemill.messages.worker_api import WorkerApi
from pagemill.messages.worker_rank import WorkerRank
from pagemill.transport.shm_queue import QueueReader, QueueWriter
from pagemill.transport.worker_protocol import (
    CALLS,
    CallFailed,
    CallMethod,
    Command,
    ExecuteModel,
    Result,
    Returned,
    Sampled,
    SampleTokens,
    Stop,
    WorkerCrashed,
    WorkerPulse,
    WorkerSpec,
    command_codec,
    result_codec,
)
from pagemill.utils.children import start_heartbeat
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.processes import Report

logger = get_logger(__name__)

PULSE_S = 1.0
RESULT_TIMEOUT_S = 300.0
"""How long the executor may leave the result queue full before the worker gives up."""
IDLE_S = 3600.0


def run(payload: bytes, report: Report) -> None:
    """Entry of the process; `payload` is a WorkerSpec. Whatever ends it by itself is reported as WorkerCrashed."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    name_process(f"worker {spec.index}")
    pulse = msgspec.msgpack.encode(WorkerPulse())
    start_heartbeat(lambda: report(pulse), PULSE_S)
    try:
        _Loop(spec).run()
    except PeerGoneError:
        logger.info("the engine is gone")
    except Exception as error:
        report(crash_of(error))
        raise SystemExit(1) from error


class _Loop:
    def __init__(self, spec: WorkerSpec) -> None:
        self._rank = spec.rank
        self._commands = QueueReader(spec.commands)
        self._results = QueueWriter(spec.results)
        self._decoder = command_codec()
        self._encoder = result_codec()
        with gc_paused():
            self._worker = build_worker(spec.worker, spec.config, spec.rank)
        self._under_way: deque[Pending[ModelRunnerOutput]] = deque()
        """Outputs not answered yet, in order; of a worker that runs ahead, there may be some."""

    def run(self) -> None:
        """Until a Stop. Raises what a step or a call raised, unless it is the caller's to mend."""
        with contextlib.closing(self._commands), contextlib.closing(self._results):
            while not isinstance(command := self._next(), Stop):
                if isinstance(command, SampleTokens):
                    self._under_way.append(self._worker.sample_tokens(command.payloads))
                    self._answer_steps()
                    continue
                if isinstance(command, CallMethod):
                    self._answer_steps(all_of_them=True)
                result = execute(self._worker, self._rank, command)
                if result is not None:
                    self._answer(result)
            self._worker.shutdown()

    def _answer_steps(self, all_of_them: bool = False) -> None:
        """Outputs that are there, or all. A worker that has no say takes them too: its slots' states follow."""
        while self._under_way and (all_of_them or self._under_way[0].ready()):
            output = self._under_way.popleft().result()
            if self._rank.returns_output:
                self._answer(Sampled(output))

    def _next(self) -> Command:
        while True:
            # The next step is given while one is under way: look for both, for a step is shorter than any sleep.
            while self._under_way and not self._commands.has_message() and not self._commands.ended():
                self._answer_steps()
            try:
                frames = self._commands.get(IDLE_S)
                if frames is not None:
                    return self._decoder.decode(frames)
            except TransportError as error:
                logger.error("dropped a command: %s", error)

    def _answer(self, result: Result) -> None:
        self._results.put(self._encoder.encode(result), RESULT_TIMEOUT_S)


def build_worker(path: str, config: bytes, rank: WorkerRank) -> WorkerApi:
    """The worker that "module:callable" makes of the configuration (msgpack) and the rank. Raises ConfigError."""
    build = load_path("worker", path)
    worker: WorkerApi = build(msgspec.msgpack.decode(config, type=EngineConfig), rank)
    return worker


def execute(worker: WorkerApi, rank: WorkerRank, command: Command) -> Result | None:
    """Execute a command other than Stop; the answer, where this rank has one. Raises what a step or a call raised,
    unless the caller can mend it."""
    match command:
        case ExecuteModel(step):
            worker.execute_model(step)
        case SampleTokens(payloads):
            output = worker.sample_tokens(payloads).result()
            return Sampled(output) if rank.returns_output else None
        case CallMethod(method, args):
            return _call(worker, method, args)
    return None


def _call(worker: WorkerApi, method: str, args: list[Any]) -> Result:
    try:
        value = getattr(worker, method)(*CALLS.unpack_args(method, args))
        return Returned(CALLS.pack_result(value))
    except PagemillError as error:
        logger.debug("%s failed", method, exc_info=True)
        return CallFailed(_known_kind(error), str(error))


def crash_of(error: BaseException) -> bytes:
    """The report of what ends a worker; called where the error is handled."""
    return msgspec.msgpack.encode(WorkerCrashed(type(error).__name__, str(error), traceback.format_exc()))


def _known_kind(error: PagemillError) -> str:
    """The nearest class of pagemill.errors."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(pagemill.errors, kind.__name__))
