"""The protocol that a worker implements and an executor calls."""

from typing import Protocol

from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput


class OutputSoon(Protocol):
    """What a step sampled, or will have. The outputs of several steps are asked for in their order, once each."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> ModelRunnerOutput:
        """The tokens."""


class OutputNow:
    """An `OutputSoon` whose tokens are there. No Future: that makes locks, at every step."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        """Always."""
        return True

    def result(self) -> ModelRunnerOutput:
        """The tokens."""
        return self._output


class WorkerApi(Protocol):
    """Start-up calls come once each, in the order of this listing; then steps in pairs of `execute_model` and one of
    the two ways to sample."""

    runs_ahead: bool
    """Whether `execute_model` and `start_sampling` return before the work is done, so that the next step can be given
    meanwhile."""

    def load_model(self) -> None:
        """Build the model and load its weights."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it keeps, in layer order."""

    def available_kv_bytes(self) -> int:
        """Bytes this worker can spend on the KV cache."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and bind it to the layers."""

    def warm_up(self) -> None:
        """Run what the first request must not pay for."""

    def prepare_more(self) -> bool:
        """Do a piece of what later requests would wait for, while no request has a slot; False when nothing is left.
        Ranks of a replica are called alike."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Run the forward pass of a step and keep its result for `sample_tokens`."""

    def sample_tokens(self) -> ModelRunnerOutput:
        """Sample from the last executed step."""

    def start_sampling(self) -> OutputSoon:
        """Sample from the last executed step; the tokens may come later."""

    def execute_dummy_step(self) -> None:
        """Run and sample a step of no request, between steps: other replicas' expert layers wait for this one's part.
        No request has a slot when it is called."""

    def shutdown(self) -> None:
        """Give everything back."""
