"""Engines with a scripted worker, and requests for them, in a line each."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import ModelFacts
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreRequest, Finish, LoRARequest, MultimodalItem
from pagemill.messages.kv_spec import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.stats import SchedulerStats
from tests.fakes.configs import cache_config, cpu_config, graph_config, model_config, parallel_config, scheduler_config
from tests.fakes.scripted_worker import ScriptedWorker

BLOCK_SIZE = 4


def full(block_size: int = BLOCK_SIZE, head_size: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, head_size, "float32")


def sliding(window: int, block_size: int = BLOCK_SIZE, head_size: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, head_size, "float32", window)


def chunked(chunk_size: int, block_size: int = BLOCK_SIZE, head_size: int = 1) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size, 1, head_size, "float32", chunk_size)


def mamba(num_floats: int = 8, block_size: int = BLOCK_SIZE) -> MambaSpec:
    return MambaSpec(block_size, ((num_floats,),), ("float32",))


def engine_config(
    *,
    max_model_len: int = 64,
    budget: int = 64,
    num_blocks: int = 64,
    caching: bool = True,
    algorithm: str = "sha256",
    partial: bool = False,
    kv_events: KVEventsConfig | None = None,
    **scheduler: object,
) -> EngineConfig:
    facts = ModelFacts("fake", "", "gguf", "Fake", {}, "float32", max_model_len, 13)
    limits = {"max_num_seqs": 8} | scheduler
    return EngineConfig(
        model=model_config(max_model_len=max_model_len),
        cache=cache_config(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=caching,
            prefix_caching_hash_algo=algorithm,
            enable_partial_block_reuse=partial,
            kv_events_config=kv_events or KVEventsConfig(),
        ),
        scheduler=scheduler_config(max_num_batched_tokens=budget, **limits),
        parallel=parallel_config(),
        graphs=graph_config(),
        cpu=cpu_config(),
        facts=facts,
    )


def make_core(
    specs: dict[str, KVCacheSpec] | None = None,
    *,
    depth: int | None = 1,
    overlap: bool = False,
    worker: ScriptedWorker | None = None,
    **settings: Any,
) -> tuple[EngineCore, ScriptedWorker]:
    """A core, and the worker behind it."""
    worker = worker or ScriptedWorker(specs)
    executor = UniprocExecutor(worker, overlap=overlap)
    return EngineCore(engine_config(**settings), executor, depth=None if overlap else depth), worker


def core_request(
    name: str,
    prompt: int | Iterable[int],
    *,
    emitted: Iterable[int] = (),
    priority: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    mm_items: Iterable[MultimodalItem] = (),
    lora: LoRARequest | None = None,
    rank: int = 0,
    **params: Any,
) -> EngineCoreRequest:
    """`prompt`: token ids, or how many."""
    prompt = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        emitted_token_ids=list(emitted),
        params=SamplingParams(**({"max_tokens": 4, "seed": 0} | params)),
        arrival_time=arrival,
        priority=priority,
        cache_salt=salt,
        mm_items=tuple(mm_items),
        lora=lora,
        rank=rank,
    )


def pooling_request(name: str, prompt: int | Iterable[int], **params: Any) -> EngineCoreRequest:
    """`core_request`, for a vector; the parameters are complete."""
    given = PoolingParams(**(dict[str, Any](pooling_type="LAST", normalize=False) | params))
    return msgspec.structs.replace(core_request(name, prompt), params=given)


class Client:
    """Collects what a core reports, per request."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.cached: dict[str, int] = {}
        self.vectors: dict[str, list[float]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, TokenLogprobs] = {}
        self.stats: SchedulerStats | None = None

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.core.add(request)

    def step(self) -> None:
        """One step, and the checks that hold after every step."""
        for outputs in self.core.step():
            named = [*outputs.request_ids, *(output.request_id for output in outputs.outputs)]
            assert len(set(named)) == len(named), "a request appears twice in one step"
            for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self._receive(name, [token])
            for output in outputs.outputs:
                self._receive(output.request_id, output.new_token_ids)
                self._receive_logprobs(output)
                if output.num_cached_tokens is not None:
                    assert output.request_id not in self.cached, "cached tokens are reported twice"
                    self.cached[output.request_id] = output.num_cached_tokens
                if output.pooled is not None:
                    self.vectors[output.request_id] = output.pooled.tolist()
                if output.finish is not None:
                    self.finish[output.request_id] = output.finish
            self.stats = outputs.stats
        self.core.check_integrity()

    def _receive_logprobs(self, output: EngineCoreOutput) -> None:
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.new_token_ids)
            self.logprobs.setdefault(output.request_id, []).append(output.logprobs)
        if output.prompt_logprobs is not None:
            assert output.request_id not in self.prompt_logprobs, "a prompt's are reported twice"
            self.prompt_logprobs[output.request_id] = output.prompt_logprobs

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.stats}")

    def _receive(self, name: str, token_ids: Sequence[int]) -> None:
        assert name not in self.finish, f"{name} goes on after its end"
        self.tokens.setdefault(name, []).extend(token_ids)
