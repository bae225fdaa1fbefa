"""`RayExecutor`: one Ray actor per worker, on the hosts of a Ray cluster.

Knows neither what a worker is made of nor where one was placed: actors are started by the name of what builds a worker.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from pagemill.engine.executor.interface import Executor, ExecutorSpec
from pagemill.engine.executor.patience import CALL_TIMEOUT_S, FAILED_CALL_S, STEP_TIMEOUT_S, STOP_GRACE_S
from pagemill.engine.executor.pending_step import PendingStep
from pagemill.engine.executor.ray_workers import RayWorkers
from pagemill.errors import ConfigError, EngineDeadError, PagemillError, TransportError
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.transport.actor_protocol import join_frames, split_frames
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

ROOM_TIMEOUT_S = 60.0
"""For the cluster to have room: what died last may still hold it, or an autoscaler may be fetching nodes."""
ONE_CPU = {"CPU": 1.0}


class RayExecutor(Executor):
    """`worker` is "module:callable", called in each actor with the configuration (an EngineConfig) and a WorkerRank.
    The models are loaded on construction, which raises ConfigError or ModelError when they cannot be or when the
    cluster has no room within `room_timeout_s` seconds, and EngineDeadError when a worker dies.

    Each worker gets `per_worker` of a node's resources, by their names in Ray (CPU, GPU). Otherwise this is as
    MultiprocExecutor: workers execute calls in their order, steps are answered in order to the thread that asks;
    not thread-safe but for `check_health`. A worker that dies, fails in a step, or does not answer ends the executor:
    every call and every pending step raises EngineDeadError from then on, and `on_death` is called, once, from a thread
    of the executor's.
    """

    def __init__(
        self,
        worker: str,
        config: Any,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        per_worker: Mapping[str, float] = ONE_CPU,
        overlap: bool = False,
        first_index: int = 0,
        on_death: Callable[[EngineDeadError], None] | None = None,
        room_timeout_s: float = ROOM_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.max_concurrent_steps = max(pipeline_parallel_size, 2 if overlap else 1)
        self._step_timeout_s = step_timeout_s
        self._encoder = command_codec()
        self._decoder = result_codec()
        self._steps: deque[tuple[PendingStep, Any]] = deque()
        world_size = tensor_parallel_size * pipeline_parallel_size
        self._ranks = range(world_size)
        self._output_rank = world_size - tensor_parallel_size
        self._workers = RayWorkers(
            worker,
            msgspec.msgpack.encode(config),
            (tensor_parallel_size, pipeline_parallel_size),
            per_worker,
            room_s=room_timeout_s,
            first_index=first_index,
            on_death=on_death,
        )
        try:
            self.call_all("load_model")
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def build(cls, spec: ExecutorSpec) -> Self:
        """From the engine's configuration. Raises ConfigError for workers that shall meet those of other engines."""
        if spec.replicas is not None:
            raise ConfigError(
                "enable_expert_parallel=True deals out experts over several engines on one machine only; "
                "distributed_executor_backend='ray' is not allowed with it: use --distributed-executor-backend mp"
            )
        return cls(
            spec.worker,
            spec.config,
            tensor_parallel_size=spec.parallel.tensor_parallel_size,
            pipeline_parallel_size=spec.parallel.pipeline_parallel_size,
            per_worker={"CPU": spec.num_threads},
            overlap=spec.overlap,
            first_index=spec.first_index,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank, each on its node."""
        return self._workers.pids

    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step on every worker."""
        parcel = self._parcel(ExecuteModel(step))
        for rank in self._ranks:
            self._workers.tell(rank, parcel)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the executed step, which is not sampled yet."""
        parcel = self._parcel(SampleTokens(payloads))
        step = PendingStep(self._fetch)
        self._steps.append((step, self._workers.ask(self._output_rank, parcel)))
        for rank in self._ranks:
            if rank != self._output_rank:
                self._workers.tell(rank, parcel)
        return step

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a WorkerApi method by name on every worker, after the steps in flight; the results by rank. Raises what
        the method raised, if that is an error of pagemill's, else EngineDeadError; ValueError for an unknown name."""
        parcel = self._parcel(CallMethod(method, CALLS.pack_args(method, args)))
        awaited = {self._workers.ask(rank, parcel): rank for rank in self._ranks}
        answers: dict[int, Result] = {}
        failed = None
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while awaited:
            for rank, content in self._workers.answers(awaited, deadline - time.monotonic()):
                answer = answers[rank] = self._decode(rank, content)
                if failed is None and isinstance(answer, CallFailed):
                    # The others may wait for the one that failed. While they do, they can do nothing else.
                    failed = answer
                    deadline = time.monotonic() + FAILED_CALL_S
            if awaited and time.monotonic() >= deadline:
                late = f"did not finish within {CALL_TIMEOUT_S:g} s"
                what = f"failed on one worker and did not finish on another: {failed.message}" if failed else late
                death = self._workers.die(f"{method} {what}")
                raise error_of(failed) if failed else death
        if failed is not None:
            raise error_of(failed)
        found = [answers[rank] for rank in self._ranks]
        return [CALLS.unpack_result(method, answer.value) for answer in found if isinstance(answer, Returned)]

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone, or has shown no sign of life for a while. From any thread."""
        self._workers.check()

    def shutdown(self) -> None:
        """Stop the workers: asked, then killed; a few seconds at most. May be called twice."""
        self._workers.stop(join_frames(self._encoder.encode(Stop())), STOP_GRACE_S)
        self._fail_steps(EngineDeadError("the workers were stopped"))

    def _parcel(self, command: Command) -> Any:
        self._workers.check()
        return self._workers.parcel(join_frames(self._encoder.encode(command)))

    def _fetch(self, step: PendingStep, wait: bool) -> None:
        """Fetch the tokens of the steps up to this one, or those that are there."""
        limit_s = self._step_timeout_s if wait else 0.0
        deadline = time.monotonic() + limit_s
        try:
            while not step.is_answered():
                oldest, reference = self._steps[0]
                content = self._workers.answer(self._output_rank, reference, deadline - time.monotonic())
                if content is None and wait:
                    raise self._workers.die(f"no step finished within {limit_s:g} s")
                if content is None:
                    return
                result = self._decode(self._output_rank, content)
                if not isinstance(result, Sampled):
                    raise self._workers.die(f"a step was answered with {type(result).__name__}")
                self._steps.popleft()
                oldest.set_result(result.output)
        except PagemillError as error:
            self._fail_steps(error)

    def _decode(self, rank: int, content: bytes) -> Result:
        try:
            return self._decoder.decode(split_frames(content))
        except TransportError as error:
            raise self._workers.die(f"the answer of worker {rank} cannot be read: {error}") from error

    def _fail_steps(self, error: PagemillError) -> None:
        while self._steps:
            self._steps.popleft()[0].set_error(error)
