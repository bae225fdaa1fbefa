"""`MultiprocExecutor`: one worker process per device of this machine, driven through shared memory.

Knows nothing about what a worker is made of: processes are started by the name of what builds one.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Self

import msgspec

from pagemill.engine.executor.interface import Executor, ExecutorSpec
from pagemill.engine.executor.patience import CALL_TIMEOUT_S, FAILED_CALL_S, STEP_TIMEOUT_S, STOP_GRACE_S
from pagemill.engine.executor.pending_step import PendingStep
from pagemill.engine.executor.worker_processes import WorkerProcesses
from pagemill.errors import EngineDeadError, PagemillError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_rank import Replicas
from pagemill.transport.shm_queue import QueueReader, wait_any
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
    command_codec,
    error_of,
    result_codec,
)

logger = get_logger(__name__)

POLL_S = 1.0
"""While waiting for a result, the workers' health is looked at this often."""
TERMINATE_S = 1.0


class MultiprocExecutor(Executor):
    """`worker` is "module:callable", called in each process with the configuration (an EngineConfig) and a WorkerRank.
    The models are loaded on construction, which raises ConfigError or ModelError when they cannot be, and
    EngineDeadError when a worker dies.

    Workers execute calls in their order, so steps overlap as much as their results are left alone; `overlap` says
    that it makes sense to do so. A step's result is fetched by the thread that asks for it, which spares each step
    two changes of threads; steps are answered in order. Not thread-safe but for `check_health`.

    A worker that dies, fails in a step, or does not answer ends the executor: every call and every pending step raises
    EngineDeadError from then on, and `on_death` is called, once, from a thread of the executor's.
    """

    def __init__(
        self,
        worker: str,
        config: Any,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        overlap: bool = False,
        first_index: int = 0,
        replicas: Replicas | None = None,
        on_death: Callable[[EngineDeadError], None] | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.max_concurrent_steps = max(pipeline_parallel_size, 2 if overlap else 1)
        self._step_timeout_s = step_timeout_s
        self._encoder = command_codec()
        self._decoder = result_codec()
        self._steps: deque[PendingStep] = deque()
        self._answers: list[Result | None] = []
        self._workers = WorkerProcesses(
            worker,
            msgspec.msgpack.encode(config),
            (tensor_parallel_size, pipeline_parallel_size),
            first_index=first_index,
            replicas=replicas,
            on_death=on_death,
        )
        try:
            self.call_all("load_model")
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def build(cls, spec: ExecutorSpec) -> Self:
        """From the engine's configuration."""
        return cls(
            spec.worker,
            spec.config,
            replicas=spec.replicas,
            tensor_parallel_size=spec.parallel.tensor_parallel_size,
            pipeline_parallel_size=spec.parallel.pipeline_parallel_size,
            overlap=spec.overlap,
            first_index=spec.first_index,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return self._workers.pids

    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step on every worker."""
        self._send(ExecuteModel(step), self._step_timeout_s)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the executed step, which is not sampled yet."""
        self._send(SampleTokens(payloads), self._step_timeout_s)
        step = PendingStep(self._fetch)
        self._steps.append(step)
        return step

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a WorkerApi method by name on every worker, after the steps in flight; the results by rank. Raises what
        the method raised, if that is an error of pagemill's, else EngineDeadError; ValueError for an unknown name."""
        values = CALLS.pack_args(method, args)
        self._answers = [None] * len(self.pids)
        self._send(CallMethod(method, values), CALL_TIMEOUT_S)
        if not self._take_until(self._is_answered, CALL_TIMEOUT_S):
            raise self._workers.die(f"{method} did not finish within {CALL_TIMEOUT_S:g} s")
        failed = next((answer for answer in self._answers if isinstance(answer, CallFailed)), None)
        if failed is not None:
            # The others may wait for the one that failed. Without their answers, the next call's would be confused.
            if not self._take_until(lambda: None not in self._answers, FAILED_CALL_S):
                self._workers.die(f"{method} failed on one worker and did not finish on another: {failed.message}")
            raise error_of(failed)
        return [CALLS.unpack_result(method, answer.value) for answer in self._answers if isinstance(answer, Returned)]

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone, or has shown no sign of life for a while. From any thread."""
        self._workers.check()

    def shutdown(self) -> None:
        """Stop the workers: asked, then SIGTERM, then SIGKILL; a few seconds at most. May be called twice."""
        self._workers.stop(self._encoder.encode(Stop()), STOP_GRACE_S, TERMINATE_S)
        self._fail_steps(EngineDeadError("the workers were stopped"))

    def _send(self, command: Command, timeout_s: float) -> None:
        self._workers.check()
        try:
            self._workers.commands.put(self._encoder.encode(command), timeout_s)
        except PeerGoneError as error:
            raise self._workers.death_after(error) from error
        except TimeoutError as error:
            raise self._workers.die(f"a worker took no command for {timeout_s:g} s: {error}") from error

    def _fetch(self, step: PendingStep, wait: bool) -> None:
        """Take results until this step has its own, or those that are there."""
        limit_s = self._step_timeout_s if wait else 0.0
        try:
            if not self._take_until(step.is_answered, limit_s) and wait:
                raise self._workers.die(f"no step finished within {limit_s:g} s")
        except PagemillError as error:
            self._fail_steps(error)

    def _is_answered(self) -> bool:
        """Whether every worker has answered the call, or one has that it failed."""
        return None not in self._answers or any(isinstance(answer, CallFailed) for answer in self._answers)

    def _take_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Take what the workers answer, until `ready` or the time is up: whether it is. Raises EngineDeadError."""
        readers = self._workers.results
        waited_s = 0.0  # looks are added up: time during which this process was stopped is nobody's fault
        while not ready():
            poll_s = min(timeout_s - waited_s, POLL_S)
            if not wait_any(readers, poll_s):
                self._workers.check_open()
                waited_s += poll_s
                if waited_s >= timeout_s:
                    return False
            for rank, reader in enumerate(readers):
                while reader.has_message():
                    self._take(rank, reader)
        return True

    def _take(self, rank: int, reader: QueueReader) -> None:
        try:
            frames = reader.get(0)
            if frames is None:
                return
            result = self._decoder.decode(frames)
        except TransportError as error:
            logger.error("dropped a result of worker %d: %s", rank, error)
            return
        if isinstance(result, Sampled) and self._steps:
            self._steps.popleft().set_result(result.output)
        elif not isinstance(result, Sampled) and self._answers:
            self._answers[rank] = result
        else:
            logger.error("dropped a result of worker %d that nobody waits for", rank)

    def _fail_steps(self, error: PagemillError) -> None:
        while self._steps:
            self._steps.popleft().set_error(error)
