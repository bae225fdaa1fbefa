"""The protocol that a worker implements and an executor calls."""

from typing import Protocol

from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput

CALLED_BY_NAME = ("describe", "save_sharded_state", "start_profile", "stop_profile")
"""Methods that users may call on all workers at any time, by name; their results are plain."""


class WorkerApi(Protocol):
    """Start-up calls come once each, in the order of this listing; then steps in pairs of `execute_model` and
    `sample_tokens`, and between them now and then one of `CALLED_BY_NAME`."""

    runs_ahead: bool
    """Whether `execute_model` and `sample_tokens` return before the work is done, so that the next step can be given
    meanwhile. The tokens of other workers are `Ready`."""

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

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the last executed step; `payloads`: what step extensions say to that. The tokens of several steps
        are asked for in the order of the steps."""

    def execute_dummy_step(self) -> None:
        """Run and sample a step of no request, between steps: other replicas' expert layers wait for this one's part.
        No request has a slot when it is called."""

    def describe(self) -> dict[str, str | int]:
        """Its rank, its device and the memory that is free there, in bytes."""

    def save_sharded_state(self, path: str = "", pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write what each rank reads of the checkpoint into files of its own in the folder `path`, which
        --load-format sharded_state loads; the names of the files. `pattern`: of the names, with {rank} and {part};
        `max_size`: bytes of a file, unless one tensor has more. Raises ConfigError."""

    def start_profile(self, prefix: str) -> None:
        """Record what is computed from now on. Raises ConfigError when that is done already, or the folder of `prefix`
        is not there."""

    def stop_profile(self) -> str:
        """Write what was recorded; the file's name, which begins with `prefix`. Raises ConfigError when nothing is
        recorded."""

    def shutdown(self) -> None:
        """Free the device's memory and leave the group of ranks."""
