"""`Executor`: the engine's whole view of its workers."""

from dataclasses import dataclass
from typing import Any, Protocol

from pagemill.config.sections import ParallelConfig
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_rank import Replicas


@dataclass(frozen=True)
class ExecutorSpec:
    """What an executor is built from."""

    worker: str
    """"module:callable", called with `config`, and with the worker's rank where there are several."""
    config: Any
    """The engine's configuration, passed on to each worker."""
    parallel: ParallelConfig
    num_threads: int
    """CPU threads of each worker."""
    overlap: bool
    """Whether the next step is scheduled while one runs."""
    replica: int = 0
    """Number of this engine among those of one server."""
    replicas: Replicas | None = None
    """Where the workers of several engines meet, if they do."""

    @property
    def first_index(self) -> int:
        """Number of the first of this engine's workers among those of one server."""
        return self.replica * self.parallel.workers_per_replica


class Executor(Protocol):
    """Steps come in pairs: execute_model(step), then sample_tokens(). Pairs may overlap up to the pipeline depth.

    A class in catalog/executors.py also has `build(spec: ExecutorSpec) -> Executor`, which returns with the workers up
    and their models loaded, and raises ConfigError for what it cannot do.
    """

    max_concurrent_steps: int
    """Steps that it makes sense to have in flight: 1 when `execute_model` returns with the work done, 2 when the next
    step can be scheduled meanwhile, and the number of stages when there are more."""

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One dict per worker: layer name -> what it keeps."""

    def available_kv_bytes(self) -> list[int]:
        """Bytes for the KV cache, per worker."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the planned cache on every worker."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step. Never returns a result."""

    def sample_tokens(self) -> Pending[ModelRunnerOutput]:
        """Sample from the oldest executed step not yet sampled."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a WorkerApi method by name on every worker."""

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone or gives no sign of life. From any thread."""

    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""
