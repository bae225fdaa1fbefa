"""pagemill's scheduler under the benchmark: the same verbs as `PeerScheduler` in benchmarks/engines/vllm_scheduler.py.

Knows nothing about repetitions or figures.
"""

import gc
import time
from typing import Any

import msgspec
import numpy as np

from pagemill import __version__
from pagemill.config.choices import HashAlgorithm
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.prefix_hash import PrefixHasher
from pagemill.engine.request import Request
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput

HASH_ALGORITHM = HashAlgorithm.SHA256


class NullWorkers:
    """Samples the same token for every slot whose prompt is complete; follows the slots as a worker does."""

    def __init__(self, num_slots: int, token: int) -> None:
        self._token = token
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The tokens of a step."""
        for new in step.new:
            self._known[new.slot] = len(new.token_ids)
            self._computed[new.slot] = new.num_computed_tokens
        self._computed[step.slots] += step.num_tokens
        slots = step.slots[self._computed[step.slots] == self._known[step.slots]]
        self._known[slots] += 1
        return ModelRunnerOutput(step.step_id, slots, np.full(len(slots), self._token, np.int32))


class OwnScheduler:
    """One scheduler with one group of full attention; workers are a token id for whoever samples."""

    def __init__(self, settings: dict[str, int], sampled_token: int, stop_token_ids: list[int]) -> None:
        """`settings` are those of `SchedulerWork.settings`."""
        spec = FullAttentionSpec(settings["block_size"], 8, 128, "bfloat16")
        config = KVCacheConfig(settings["num_blocks"], (KVCacheGroup(("layer",), spec),))
        self._limits = SchedulerLimits(
            settings["max_num_batched_tokens"], settings["max_num_seqs"], settings["max_model_len"]
        )
        self._kv = KVCacheManager(config, HASH_ALGORITHM)
        self._scheduler = Scheduler(self._limits, self._kv)
        self._workers = NullWorkers(self._limits.max_num_seqs, sampled_token)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_array_bytes).encode
        self._block_size = spec.block_size
        self._stop_token_ids = tuple(stop_token_ids)
        self._num_requests = 0

    def settings(self) -> dict[str, Any]:
        """Of the scheduler; all else is the engine's default."""
        return {
            "engine": f"pagemill {__version__}",
            "async_scheduling": False,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": HASH_ALGORITHM,
            "max_num_seqs": self._limits.max_num_seqs,
            "max_num_batched_tokens": self._limits.max_num_batched_tokens,
            "max_model_len": self._limits.max_model_len,
            "statistics": True,
        }

    def run(self, prompt: list[int]) -> None:
        """One request for one token, from beginning to end."""
        self._scheduler.add(self._request(prompt, 1))
        self._step()

    def admit(self, prompt: list[int]) -> dict[str, float]:
        """One request for one token; what it took to get from the message of the front end to that for the workers."""
        message = self._request(prompt, 1)
        start = time.perf_counter()
        self._scheduler.add(message)
        step = _some(self._scheduler.schedule())
        seconds = time.perf_counter() - start
        num_bytes = len(self._encode(step))
        self._scheduler.update(self._workers.run(step))
        return {"seconds": seconds, "cached_tokens": step.new[0].num_computed_tokens, "bytes": num_bytes}

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Requests that go on generating; returns when all do."""
        for prompt in prompts:
            self._scheduler.add(self._request(prompt, max_tokens))
        while True:
            step, _ = self._step()
            if not step.new and step.total_tokens == len(step.slots):
                break

    def settle(self) -> None:
        """Keep what there is out of the garbage collector's way from now on, as a server does after its start."""
        gc.collect()
        gc.freeze()

    def steps(self, count: int) -> list[float]:
        """Seconds in the scheduler of each of `count` steps."""
        return [self._step()[1] for _ in range(count)]

    def step_bytes(self, count: int) -> float:
        """Mean bytes of the message to the workers over `count` steps."""
        return sum(len(self._encode(self._step()[0])) for _ in range(count)) / count

    def hash_seconds(self, algorithm: HashAlgorithm, prompt: list[int]) -> float:
        """Time to hash the full blocks of a prompt. Raises ConfigError when the algorithm's package is missing."""
        hasher = PrefixHasher(algorithm, self._block_size)
        request = Request(self._request(prompt, 1), sequence=0, max_model_len=self._limits.max_model_len)
        start = time.perf_counter()
        hasher.extend(request)
        return time.perf_counter() - start

    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._kv.pool.cached_blocks())

    def _request(self, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
        params = SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=self._stop_token_ids)
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=time.monotonic())

    def _step(self) -> tuple[SchedulerOutput, float]:
        """One step, and seconds spent in the scheduler."""
        start = time.perf_counter()
        step = _some(self._scheduler.schedule())
        scheduled = time.perf_counter()
        output = self._workers.run(step)
        sampled = time.perf_counter()
        self._scheduler.update(output)
        return step, scheduled - start + time.perf_counter() - sampled


def _some(step: SchedulerOutput | None) -> SchedulerOutput:
    if step is None:
        raise RuntimeError("the scheduler has requests and schedules none")
    return step


def _array_bytes(value: object) -> bytes:
    """An array as it would cross to another process."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is not part of a step")
    return value.tobytes()
