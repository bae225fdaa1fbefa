"""`Worker`: brings up the device, loads the model, measures memory, and implements `messages.worker_api.WorkerApi`."""

import gc
from dataclasses import asdict, replace
from pathlib import Path

from pagemill.catalog.logits import load_processors
from pagemill.config.compilation import NO_COMPILER
from pagemill.config.engine_config import EngineConfig
from pagemill.errors import ConfigError, PagemillError
from pagemill.log import get_logger
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheSpec, cache_dtype
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.worker_rank import SOLO_RANK, WorkerRank
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.distributed.init import init_distributed
from pagemill.model.distributed.parallel_groups import ParallelGroups, ParallelSizes, solo_groups
from pagemill.model.factory import load_model, save_sharded_state
from pagemill.model.kernels import ops
from pagemill.model.loading.shards import MAX_FILE_BYTES, PATTERN
from pagemill.model.models.causal_lm import CausalLM
from pagemill.platforms.choose import choose_platform
from pagemill.platforms.interface import Platform
from pagemill.utils.gc_pause import gc_paused
from pagemill.utils.timing import PhaseTimer
from pagemill.worker.build_runner import BoundCache, RunnerOptions, RunnerSizes, build_runner
from pagemill.worker.kv_tensors.allocate import bind_kv_cache, bind_profile_cache
from pagemill.worker.memory import MemoryWatch
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.profiler import WorkerProfiler
from pagemill.worker.sampling.processors.interface import LogitsProcessor
from pagemill.worker.sampling.sampler import SamplerOptions
from pagemill.worker.spec_decode.interface import Speculation, speculation_of
from pagemill.worker.spec_decode.load_draft import LoadedDraft, load_draft, reads_embeddings
from pagemill.worker.warm_up import dummy_step, warm_up_step, worst_steps

logger = get_logger(__name__)

DEFAULT_KV_TOKENS = 65_536
MAX_KV_SHARE = 0.4


class Worker:
    """One device of one model replica: all of the model, or the part of it that is `rank`'s.

    The ranks of a replica are called alike and at the same time: from `load_model` on, each waits for the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: WorkerRank = SOLO_RANK,
        platform: Platform | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`platform` and `speculation`, who proposes drafts: the configuration's, unless they are given.
        Raises ConfigError when there are not as many workers as the configuration asks for."""
        wanted = (config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
        if (rank.tensor_parallel_size, rank.pipeline_parallel_size) != wanted:
            raise ConfigError(
                f"tensor_parallel_size={wanted[0]} x pipeline_parallel_size={wanted[1]} does not fit the "
                f"{rank.tensor_parallel_size} x {rank.pipeline_parallel_size} workers of this engine"
            )
        self._config = config
        self._rank = rank
        self._speculation = speculation or speculation_of(config.speculation)
        self._groups: ParallelGroups | None = None
        self._platform: Platform = platform or choose_platform(config.device.device)
        self.runs_ahead = self._platform.runs_ahead
        self._processors: list[type[LogitsProcessor]] = []
        self._loaded: CausalLM | None = None
        self._draft: LoadedDraft | None = None
        self._runner: ModelRunner | None = None
        self._num_groups = 0
        self._watch: MemoryWatch | None = None
        self._profiler = WorkerProfiler(rank.rank)

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        if self._loaded is None:
            raise PagemillError("the worker has no model yet; load_model comes first")
        return self._loaded

    @property
    def runner(self) -> ModelRunner:
        """The model runner."""
        if self._runner is None:
            raise PagemillError("the worker has no KV cache yet; initialize_kv_cache comes first")
        return self._runner

    @gc_paused()
    def load_model(self) -> None:
        """Meet the other ranks, build this rank's part of the model and load its weights."""
        self._processors = _processors(self._config.model.logits_processors)
        threads = self._config.cpu.cpu_threads
        if threads is not None:
            self._platform.set_threads(threads, self._config.cpu.cpus_of(self._rank.rank))
        timer = PhaseTimer()
        rank = self._rank
        with timer.phase("device"):
            self._platform.start(rank.local_rank)
            memory = self._platform.memory()
            self._watch = None if memory is None else MemoryWatch(memory)
        with timer.phase("ranks"):
            self._groups = init_distributed(
                rank.global_rank,
                rank.world_size * rank.num_replicas,
                rank.local_rank,
                rank.init_address,
                self._platform.dist_backend(),
                ParallelSizes(rank.tensor_parallel_size, rank.pipeline_parallel_size, rank.num_replicas),
            )
        config = self._config
        groups = self._groups
        experts = config.parallel.enable_expert_parallel
        shares = reads_embeddings(config.draft)
        self._loaded = load_model(
            config.facts, config.model, self._platform, timer, groups, config.cache, experts, shares
        )
        if config.draft is not None and groups.pp.rank == groups.pp.size - 1:
            self._draft = load_draft(config.draft, self._loaded, self._platform, timer, groups, config.cache)
        if self._watch is not None:
            self._watch.loaded()
        logger.debug("loaded %s: %s", self._config.facts.architecture, timer.summary())

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it keeps, in layer order."""
        cache = self._config.cache
        block_size = cache.block_size
        dtype = cache_dtype(cache.kv_cache_dtype, self._config.model.dtype)
        return {name: layer.kv_spec(block_size, dtype) for name, layer in self._cache_layers().items()}

    def available_kv_bytes(self) -> int:
        """What was asked for, or what a device of its own has left. In the host's memory, room for DEFAULT_KV_TOKENS
        tokens (at least one request of full length), but no more than MAX_KV_SHARE of what is free, which all workers
        of a replica share."""
        asked = self._config.cache.kv_cache_memory_bytes
        if self._watch is not None:
            return self._try_out(self._watch, asked)
        if asked is not None:
            return asked
        specs = self.kv_cache_specs().values()
        length = self._config.model.max_model_len
        num_tokens = max(DEFAULT_KV_TOKENS, length + 2 * max(spec.block_size for spec in specs))
        requests = self._config.scheduler.max_num_seqs
        wanted = sum(spec.page_bytes() * spec.default_blocks(num_tokens, requests) for spec in specs)
        return min(wanted, int(self._platform.facts().free_bytes * MAX_KV_SHARE) // self._rank.world_size)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache, bind it to the layers, and build the runner."""
        tensors = bind_kv_cache(config, self._cache_layers(), self._platform.torch_device())
        self._num_groups = len(config.groups)
        self._runner = self._build_runner(BoundCache(config, tensors))

    def warm_up(self) -> None:
        """Run one small step on the null block, so that the first request does not pay for lazy initialisation, and
        capture what must be there before it."""
        with gc_paused():
            self.execute_model(warm_up_step(self._num_groups, self._sizes().max_model_len))
            self.sample_tokens().result()
            self.runner.capture_at_start()

    def prepare_more(self) -> bool:
        """Capture one more graph."""
        return self.runner.capture_one()

    def execute_model(self, step: SchedulerOutput) -> None:
        """Run a step's forward pass."""
        self.runner.execute_model(step)

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        """Sample from the last executed step, without waiting for the tokens."""
        return self.runner.sample_tokens(payloads)

    def execute_dummy_step(self) -> None:
        """Run and sample a step of no request, on the null block."""
        self.execute_model(dummy_step(self._num_groups, self._sizes().max_model_len))
        self.sample_tokens().result()

    def describe(self) -> dict[str, str | int]:
        """Its rank, its device and the memory that is free there, in bytes."""
        facts = self._platform.facts()
        return {"rank": self._rank.rank, "device": facts.title or facts.kind, "free_bytes": facts.free_bytes}

    def save_sharded_state(self, path: str = "", pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write what this rank reads of the checkpoint into files of its own; their names. Raises ConfigError."""
        if not path:
            raise ConfigError("path is missing: the folder that the state is saved in")
        if max_size is not None and max_size < 1:
            raise ConfigError(f"max_size={max_size} is too small: at least 1 byte")
        config = self._config
        return save_sharded_state(
            config.facts,
            config.model,
            self._platform,
            self._groups or solo_groups(),
            Path(path),
            config.cache,
            config.parallel.enable_expert_parallel,
            pattern or PATTERN,
            max_size or MAX_FILE_BYTES,
            reads_embeddings(config.draft),
        )

    def start_profile(self, prefix: str) -> None:
        """Record what is computed from now on. Raises ConfigError."""
        self._profiler.start(prefix)

    def stop_profile(self) -> str:
        """Write what was recorded; the file's name. Raises ConfigError."""
        return self._profiler.stop()

    def shutdown(self) -> None:
        """Give the model and the cache back."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._loaded = self._draft = None
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if self._watch is not None:
            gc.collect()
            self._watch.memory.restart_peak()
        self._platform.release_threads()

    def _build_runner(self, cache: BoundCache, *, compiles: bool = True) -> ModelRunner:
        """`compiles`: or else the model is not compiled, even where the settings say so."""
        stages = None if self._groups is None else self._groups.pp
        graphs = self._config.graphs
        if not compiles:
            given = replace(graphs.compilation_config, mode=NO_COMPILER)
            graphs = replace(graphs, compilation_config=given)
        model = self._config.model
        return build_runner(
            cache,
            self.model,
            self._platform,
            self._sizes(),
            graphs,
            stages,
            self._rank.rank,
            ranks=None if self._groups is None else self._groups.tp,
            sampling=SamplerOptions(self._processors, model.logprobs_mode),
            options=RunnerOptions(
                model.pools,
                not model.disable_cascade_attn,
                self._speculation,
                self._draft,
                model.pooler_config.activation,
            ),
        )

    def _cache_layers(self) -> dict[str, CacheLayer]:
        """Of the model, and of the one that proposes drafts."""
        return self.model.cache_layers() | ({} if self._draft is None else self._draft.model.cache_layers())

    def _sizes(self) -> RunnerSizes:
        return RunnerSizes.of(self._config.scheduler, self._config.model.max_model_len)

    def _try_out(self, watch: MemoryWatch, asked: int | None) -> int:
        """Bytes for the KV cache: as `asked`, or what the worst steps leave, run on a cache of almost nothing. Before,
        these and the other steps that come before the first request are precompiled: their kernels, compiled one by one
        as each is first launched, would take longer than all the rest of the start."""
        share = self._config.cache.gpu_memory_utilization
        layers = self._cache_layers()
        if asked is None:
            watch.check_room(share)
        plan, tensors = bind_profile_cache(self.kv_cache_specs(), layers, self._platform.torch_device())
        runner = self._build_runner(BoundCache(plan, tensors), compiles=False)
        worst: list[SchedulerOutput] = []
        if asked is None:  # or memory may be short, and nothing depends on them
            block_sizes = [group.spec.block_size for group in plan.groups]
            worst = list(worst_steps(block_sizes, **asdict(self._sizes())))
        precompilation = runner.precompile([warm_up_step(len(plan.groups), self._sizes().max_model_len), *worst])
        several = self._rank.world_size * self._rank.num_replicas > 1  # ranks that must not differ in what they run
        with ops.compile_together(self._platform.torch_device(), precompilation, whole=several):
            for step in worst:
                runner.execute_model(step)
                runner.sample_tokens().result()
            if worst:
                runner.run_largest()
        budget = watch.budget(share, num_graphs=runner.num_graphs, kv_cache=sum(map(len, tensors)))
        del runner, precompilation, tensors
        gc.collect()  # a runner and its graphs hold each other
        watch.memory.restart_peak()
        if asked is not None:
            return asked
        logger.info("%s", budget.table())
        return budget.kv_cache


def _processors(added: tuple[str, ...]) -> list[type[LogitsProcessor]]:
    """Raises ConfigError for something that is no processor."""
    found = load_processors(added)
    for processor in found:
        if not (isinstance(processor, type) and issubclass(processor, LogitsProcessor)):
            raise ConfigError(f"logits processor {processor!r} does not derive from pagemill.LogitsProcessor")
    return found
