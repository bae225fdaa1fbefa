"""`Executor`: the engine's whole view of its workers."""

from typing import Any, Protocol

from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput


class StepResult(Protocol):
    """What a step sampled, now or later: a Future is one."""

    def result(self) -> ModelRunnerOutput:
        """The tokens, waited for. Raises what went wrong."""


class Executor(Protocol):
    """Steps come in pairs: execute_model(step), then sample_tokens(). Pairs may overlap up to the pipeline depth."""

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

    def sample_tokens(self) -> StepResult:
        """Sample from the oldest executed step not yet sampled."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a WorkerApi method by name on every worker."""

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone or gives no sign of life. From any thread."""

    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""
