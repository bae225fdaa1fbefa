"""`Executor`: the engine's whole view of its workers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pagemill.config.sections import ParallelConfig
from pagemill.messages.extensions import SamplingPayloads
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


class Executor(ABC):
    """Steps come in pairs: execute_model(step), then sample_tokens(). Pairs may overlap up to the pipeline depth.

    A class in catalog/executors.py also has `build(spec: ExecutorSpec) -> Executor`, which returns with the workers up
    and their models loaded, and raises ConfigError for what it cannot do.
    """

    max_concurrent_steps: int
    """Steps that it makes sense to have in flight: 1 when `execute_model` returns with the work done, 2 when the next
    step can be scheduled meanwhile, and the number of stages when there are more."""

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> None:
        """Start a step. Never returns a result."""

    @abstractmethod
    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the executed step, which is not sampled yet; `payloads`: what step extensions say to that, which
        may depend on the tokens of the step before."""

    @abstractmethod
    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a WorkerApi method by name on every worker; the results by rank."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone or gives no sign of life. From any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One dict per worker: layer name -> what it keeps."""
        return self.call_all("kv_cache_specs")

    def available_kv_bytes(self) -> list[int]:
        """Bytes for the KV cache, per worker."""
        return self.call_all("available_kv_bytes")

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the planned cache on every worker."""
        self.call_all("initialize_kv_cache", config)
