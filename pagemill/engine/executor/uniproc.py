"""`UniprocExecutor`: one worker in this process, on the caller's thread or on a thread of its own.

Knows nothing about what a worker is made of: it is given one, or the name of what builds one.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from pagemill.catalog.registry import load_path
from pagemill.engine.executor.interface import Executor, ExecutorSpec
from pagemill.errors import EngineDeadError
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import OnThread, Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_api import WorkerApi
from pagemill.messages.worker_rank import ranks_of


class UniprocExecutor(Executor):
    """`worker` is a WorkerApi, or "module:callable" which is called with `args` and returns one. Its model is
    loaded on construction. Raises ConfigError for a name that cannot be resolved.

    overlap=False: a step is done when the call returns. overlap=True: the next one can be scheduled meanwhile; a worker
    that runs ahead by itself is called directly, another one on a thread, in order.
    """

    def __init__(self, worker: WorkerApi | str, *args: Any, overlap: bool = False) -> None:
        self.max_concurrent_steps = 2 if overlap else 1
        self._executed: Future[None] | None = None
        self._worker: WorkerApi = load_path("worker", worker)(*args) if isinstance(worker, str) else worker
        ahead = overlap and self._worker.runs_ahead
        self._thread = ThreadPoolExecutor(1, "pagemill-worker") if overlap and not ahead else None
        self._closed = False
        try:
            self._worker.load_model()
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def build(cls, spec: ExecutorSpec) -> Self:
        """From the engine's configuration."""
        ranks = () if spec.replicas is None else ranks_of(1, 1, "", spec.replicas)
        return cls(spec.worker, spec.config, *ranks, overlap=spec.overlap)

    def execute_model(self, step: SchedulerOutput) -> None:
        """Run a step's forward pass, or start it."""
        if self._thread is None:
            self._worker.execute_model(step)
        else:
            self._executed = self._thread.submit(self._worker.execute_model, step)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the last step. The result raises what either call of the worker raised, unless that has."""
        if self._thread is None or self._executed is None:
            return self._worker.sample_tokens(payloads)
        return OnThread(self._thread.submit(self._sample_after, self._executed, payloads))

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker by name, after the steps that are in flight."""
        call = getattr(self._worker, method)
        return [call(*args) if self._thread is None else self._thread.submit(call, *args).result()]

    def check_health(self) -> None:
        """Raise EngineDeadError after `shutdown`; otherwise the worker lives as this process does."""
        if self._closed:
            raise EngineDeadError("the worker was stopped")

    def shutdown(self) -> None:
        """Stop the worker, once."""
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._thread.shutdown()
            self._worker.shutdown()

    def _sample_after(self, executed: "Future[None]", payloads: SamplingPayloads | None) -> ModelRunnerOutput:
        executed.result()  # done, as the thread runs one after the other; raises what the forward pass raised
        return self._worker.sample_tokens(payloads).result()
