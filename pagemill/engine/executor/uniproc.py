"""`UniprocExecutor`: one worker in this process. A step is done when the call returns.

Knows nothing about what a worker is made of: it is given one, or the name of what builds one.
"""

import importlib
from concurrent.futures import Future
from typing import Any

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_api import WorkerApi


class UniprocExecutor:
    """`worker` is a WorkerApi, or "module:callable" which is called with `args` and returns one. Its model is
    loaded on construction. Raises ConfigError for a name that cannot be resolved."""

    def __init__(self, worker: WorkerApi | str, *args: Any) -> None:
        self._worker: WorkerApi = _build(worker, args) if isinstance(worker, str) else worker
        self._closed = False
        self._worker.load_model()

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One dict, for the one worker."""
        return [self._worker.kv_cache_specs()]

    def available_kv_bytes(self) -> list[int]:
        """One number, for the one worker."""
        return [self._worker.available_kv_bytes()]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the planned cache."""
        self._worker.initialize_kv_cache(config)

    def execute_model(self, step: SchedulerOutput) -> None:
        """Run a step's forward pass."""
        self._worker.execute_model(step)

    def sample_tokens(self) -> "Future[ModelRunnerOutput]":
        """Sample from the last step; the future is done."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._worker.sample_tokens())
        return future

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker by name."""
        return [getattr(self._worker, method)(*args)]

    def shutdown(self) -> None:
        """Stop the worker, once."""
        if not self._closed:
            self._closed = True
            self._worker.shutdown()


def _build(path: str, args: tuple[Any, ...]) -> WorkerApi:
    module, _, attribute = path.partition(":")
    try:
        build = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"worker {path!r} cannot be found; 'module:callable' is expected: {error}") from error
    worker: WorkerApi = build(*args)
    return worker
