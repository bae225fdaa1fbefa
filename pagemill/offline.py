"""What `LLM` is made of besides prompts and outputs: an event loop of its own, and `OfflineControl`, what the engine
behind it can be told and asked."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pagemill.config.engine_config import EngineConfig
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.observability.readings import Metric, readings
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.other_arguments import refuse_others, refused_method
from pagemill.tokenizers.interface import Tokenizer

T = TypeVar("T")


class PrivateLoop:
    """An event loop of our own, run while a call lasts. Ctrl-C cancels the call, whose clean-up then runs."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._task: asyncio.Task[Any] | None = None
        self._turn = threading.Lock()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to completion, also when the calling thread runs another loop (a notebook): then in a helper thread.
        Threads take turns. Raises EngineDeadError after `close`."""
        with self._turn:
            if self._closed:
                work.close()
                raise EngineDeadError("the LLM was shut down; make another one")
            if _in_running_loop():
                return self._run_aside(self._tracked(work))
            found: list[T] = []
            self._runner.run(_append(found, work))
            return found[0]

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then close the loop."""
        try:
            self.run(last)
        finally:
            self._closed = True
            if _in_running_loop():
                with ThreadPoolExecutor(1) as helper:
                    helper.submit(self._runner.close).result()
            else:
                self._runner.close()

    def _run_aside(self, work: Coroutine[Any, Any, T]) -> T:
        with ThreadPoolExecutor(1, "pagemill-llm") as helper:
            future = helper.submit(self._runner.run, work)
            try:
                return future.result()
            except KeyboardInterrupt:
                if self._task is not None:
                    self._runner.get_loop().call_soon_threadsafe(self._task.cancel)
                raise

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        return await work


async def _append(found: list[T], work: Coroutine[Any, Any, T]) -> None:
    """The runner's task has no result: when it restores the handler of Ctrl-C, the `signal` module makes a text of the
    task that contains it, which takes as long as many requests if it is their outputs."""
    found.append(await work)


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class OfflineControl:
    """For `LLM` to inherit."""

    config: EngineConfig
    _engine: AsyncLLM
    _loop: PrivateLoop

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Every `vllm:*` metric, as Counter, Gauge, Vector or Histogram. See docs/metrics.md.

        Raises ConfigError unless the LLM was made with disable_log_stats=False."""
        if not self._engine.metrics.enabled:
            raise ConfigError("get_metrics() needs statistics, which LLM keeps with disable_log_stats=False only")
        return readings(self._engine.metrics.collect())

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with the values that the model recommends."""
        return self._engine.default_params

    def get_world_size(self, include_dp: bool = True) -> int:
        """Workers that compute the model together. `include_dp`: of all engines, of which an LLM has one."""
        return self.config.parallel.workers_per_replica

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Forget cached prefixes. False when blocks are in use and nothing was done. `others`: arguments of vLLM that
        have no counterpart, with values that ask for nothing."""
        refuse_others("LLM.reset_prefix_cache", others)
        return self._loop.run(self._engine.reset_prefix_cache())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[str | int | float | bool | None] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker, by name; the results by rank. See `AsyncLLM.collective_rpc`."""
        return self._loop.run(self._engine.collective_rpc(method, timeout, args, kwargs))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[list[str]]:
        """Write what each rank reads of the checkpoint into files of its own in a folder, for load_format
        "sharded_state"; the names of the files by rank. See `AsyncLLM.save_sharded_state`."""
        return self._loop.run(self._engine.save_sharded_state(path, pattern, max_size))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the workers compute, until `stop_profile`. See `AsyncLLM.start_profile`."""
        self._loop.run(self._engine.start_profile(profile_prefix))

    def stop_profile(self) -> list[str]:
        """End the recording; the files of Chrome traces, one per worker. Raises ConfigError when there is none."""
        return self._loop.run(self._engine.stop_profile())

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which for a method of vLLM says what to do instead."""
        raise refused_method("LLM", name)
