"""The sections of the configuration. A field's help text is its documentation; flags and docs come from it.

What users ask for is a section whose open fields are None, such as `CacheSettings`. What runs is the same section with
those fields filled in by `resolve`, such as `CacheConfig`: a subclass that names them again, without None and without a
default. A section of which nothing is filled in is one class, such as `DeviceConfig`. `EngineSettings`, at the end,
lists the sections (docs/adr/0004-settings-and-config.md); larger ones have a file each.
"""

from dataclasses import dataclass, field, replace

from pagemill.config.choices import Convert, HashAlgorithm, LogprobsMode, Runner, SchedulingPolicy
from pagemill.config.fields import setting
from pagemill.config.graph_config import GRAPHS, GraphSettings
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.config.pooler_config import PoolerConfig, PoolerSettings
from pagemill.config.speculation import SPECULATION, SpeculationSettings
from pagemill.config.structured_outputs import StructuredOutputsConfig
from pagemill.config.thread_lists import join_lists, parse_lists

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_IMPLS = ("auto", "native", "vllm", "transformers")
KV_CACHE_DTYPES = (
    *("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("int8", "int8_per_token_head"),
)


@dataclass(frozen=True)
class AttentionConfig:
    """Which attention backends run, by name (docs/reference/attention-backends.md)."""

    backend: str | None = setting(
        None, "backend of every layer, in every step (default: the platform's first that fits)"
    )
    prefill_backend: str | None = setting(
        None, "backend of steps in which some request has several tokens (default: as backend)"
    )
    decode_backend: str | None = setting(
        None, "backend of steps in which every request has one token (default: as backend)"
    )
    layer_backends: dict[str, object] = setting(
        {}, "JSON object: pattern of layer names, such as *.0.self_attn.attn -> backend; the first that matches counts"
    )
    flash_attn_version: int | None = setting(
        None, "version of FLASH_ATTN, 2 or 3 (default: the newest that is installed)"
    )


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model: str = setting("smollm2", "alias, folder in Hugging Face format, .gguf file, or hub id")
    tokenizer: str | None = setting(None, "folder, .gguf file or hub id of the tokenizer (default: the model's)")
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: prompts are token ids, and outputs have no text")
    dtype: str = setting("auto", "type of weights and activations", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "precision of weights: none dequantizes a quantized file; int8, int4, int4_g64, int4_g128, fp8 and "
        "fp8_per_block quantize a float checkpoint, int8 also the floats of a quantized one; also the quant_method of "
        "a checkpoint, or a name that a plug-in adds (default: as in the file)",
        short="-q",
    )
    seed: int = setting(
        0, "seed of everything random that no request seeds: dummy weights, and the seeds of requests that have none"
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    tokenizer_revision: str | None = setting(
        None,
        "branch, tag or commit of the tokenizer (default: the model's revision; of another repository, its "
        "main branch)",
    )
    max_model_len: int | None = setting(None, "most tokens of prompt and output (default: the model's)", low=1)
    load_format: str = setting(
        "auto",
        "where weights come from: safetensors or gguf, of which auto takes what is there; dummy makes random ones, "
        "sharded_state is what was saved of each rank, module:function a loader of one's own (docs/loading.md)",
    )
    model_loader_extra_config: dict[str, object] = setting(
        {}, "JSON object: options of the load format; sharded_state has pattern, the names of its files"
    )
    use_tqdm_on_load: bool = setting(
        True, "show how far loading is where it takes more than 2 seconds: a bar on a terminal, else lines in the log"
    )
    model_impl: str = setting(
        "auto",
        "whose code computes the model: native (also called vllm) is what is implemented here, transformers the "
        "library of that name, which is slower, auto the first where there is one",
        choices=MODEL_IMPLS,
    )
    download_dir: str | None = setting(None, "folder for hub downloads (default: the hub's own cache)")
    ignore_patterns: tuple[str, ...] = setting(
        ("original/**/*",), "files of a repository of the hub that are not fetched, as patterns"
    )
    hf_overrides: dict[str, object] = setting({}, "JSON object laid over the model's config.json")
    generation_config: str = setting(
        "auto",
        "where default sampling comes from: 'auto' is the model's generation_config.json, 'vllm' none (neutral "
        "defaults), anything else a folder with such a file",
    )
    override_generation_config: dict[str, object] = setting(
        {},
        "JSON object laid over it: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens, eos_token_id",
    )
    logits_processors: tuple[str, ...] = setting(
        (), "logits processors of one's own, as module:Class; they apply after the built-in ones (docs/sampling.md)"
    )
    chat_template: str | None = setting(None, "file with a Jinja chat template (default: the model's)")
    parse_control_tokens: str = setting(
        "prompts",
        "where a control token that is spelled out as text becomes one: in prompts of completions, also in messages of "
        "chats (all), or nowhere (none)",
        choices=("prompts", "all", "none"),
    )
    attention_backend: str | None = setting(None, "attention backend by name (default: the platform's first that fits)")
    attention_config: AttentionConfig = setting(
        AttentionConfig(), "JSON object: attention backends by layer and phase", short="-ac"
    )
    disable_cascade_attn: bool = setting(
        True,
        "false: a long prefix that all decoding requests share is attended to once for all of them (GPUs, TRITON_ATTN)",
    )
    deterministic: bool = setting(False, "give a request's tokens and logprobs the same bits in any batch")
    runner: Runner = setting(
        Runner.AUTO,
        "generate: text; pooling: embeddings, by any model (default: pooling for folders that say they are for it)",
        choices=tuple(Runner),
    )
    convert: Convert = setting(
        Convert.AUTO,
        "with --runner pooling, what is made of hidden states: embed: vectors; classify: the classes of a head, or of "
        "tokens (classifier_from_token in --hf-overrides); reward: what a head says of each token (default: as the "
        "checkpoint is named)",
        choices=tuple(Convert),
    )
    pooler_config: PoolerSettings = setting(PoolerSettings(), "JSON object: how prompts become vectors")
    structured_outputs_config: StructuredOutputsConfig = setting(
        StructuredOutputsConfig(), "JSON object: what follows the forms of outputs, and what holds for all of them"
    )
    max_logprobs: int = setting(
        20, "most candidates per token whose log-probabilities a request may ask for; -1: the whole vocabulary", low=-1
    )
    logprobs_mode: LogprobsMode = setting(
        LogprobsMode.RAW_LOGPROBS,
        "what logprobs are: log-probabilities or logits, as the model gives them (raw) or after logits processors, "
        "temperature and filters (processed)",
        choices=tuple(LogprobsMode),
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """`ModelSettings`, resolved: dtype and runner are not auto."""

    dtype: str = field()
    deterministic: bool = field(default=False)
    max_model_len: int = field()
    runner: Runner = field()
    convert: Convert = field(default=Convert.NONE)
    pooler_config: PoolerConfig = field()
    structured_outputs_config: StructuredOutputsConfig = field()

    @property
    def pools(self) -> bool:
        """Whether prompts become vectors instead of text."""
        return self.runner == Runner.POOLING


@dataclass(frozen=True)
class CacheSettings:
    """The paged KV cache."""

    block_size: int | None = setting(None, "tokens per block (default: 16)", low=1)
    kv_cache_dtype: str = setting(
        "auto",
        "type of keys and values in the cache; auto is the model's, fp8 is fp8_e4m3, int8 is int8_per_token_head: "
        "integers with a scale for each token and head (CPUs only)",
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = setting(True, "share the blocks of equal prefixes")
    prefix_caching_hash_algo: HashAlgorithm = setting(
        HashAlgorithm.SHA256, "hash of a block's tokens", choices=tuple(HashAlgorithm)
    )
    kv_cache_metrics: bool = setting(
        False,
        "export histograms of the lifetime of KV blocks, of their idle time and of the gaps between uses "
        "(needs statistics)",
    )
    kv_cache_metrics_sample: float = setting(0.01, "share of KV blocks that is measured, above 0 and up to 1", low=0)
    disable_hybrid_kv_cache_manager: bool = setting(
        False, "keep every token of every layer, also where only a window or a chunk is read; more memory"
    )
    enable_partial_block_reuse: bool = setting(
        False, "share a prefix to the token: what of the next block is equal is copied (needs prefix caching)"
    )
    num_gpu_blocks_override: int | None = setting(None, "number of blocks, whatever the memory", low=2)
    kv_cache_memory_bytes: int | None = setting(
        None,
        "bytes for the KV cache (default on a CPU: room for 65,536 tokens, at most 40% of free memory; on a GPU: what "
        "gpu_memory_utilization leaves)",
        low=1,
    )
    gpu_memory_utilization: float = setting(
        0.92,
        "share of the GPU's memory that one worker may use, above 0 and up to 1",
        low=0,
        short="--device-memory-utilization",
    )
    kv_events_config: KVEventsConfig = setting(
        KVEventsConfig(), "JSON object: publish what is cached, for routers that place requests by it"
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig(CacheSettings):
    """The KV cache as it runs: `CacheSettings` with every field decided."""

    block_size: int = field()


@dataclass(frozen=True)
class SchedulerSettings:
    """How much one step does, and for how many."""

    max_num_batched_tokens: int | None = setting(None, "token budget of one step (default: 2048, on a GPU 8192)", low=1)
    max_num_seqs: int | None = setting(
        None,
        "most requests that run at once (default: 128; on a GPU 256, and 1024 where it has 70 GiB of memory or more)",
        low=1,
    )
    enable_chunked_prefill: bool = setting(True, "split prompts that exceed the budget of a step")
    max_prefill_tokens: int | None = setting(
        None,
        "prompt tokens of the requests that one step starts, a longer prompt starts alone; 0: no limit but the budget "
        "(default: 320 for each thread of a CPU, 0 on a GPU)",
        low=0,
    )
    long_prefill_token_threshold: int = setting(0, "most prompt tokens of one request in a step; 0: no limit", low=0)
    scheduling_policy: SchedulingPolicy = setting(
        SchedulingPolicy.FCFS, "order of waiting requests", choices=tuple(SchedulingPolicy)
    )
    enable_jump_forward: bool = setting(
        True, "append what a grammar leaves no choice about at once, instead of asking the model for each token of it"
    )
    async_scheduling: bool | None = setting(
        None,
        "schedule the next step while one runs (default: where the workers run in processes of their own, or on a GPU)",
    )
    max_num_queued_reqs: int = setting(
        10_000,
        "completions that may wait, in addition to max_num_seqs that run in each engine, before new ones get "
        "503; 0: no limit",
        low=0,
    )
    max_num_queued_tokens: int = setting(
        0, "prompt tokens that may wait before new requests get 503; 0: no limit", low=0
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """The scheduler as it runs: `SchedulerSettings` with every field decided."""

    max_num_batched_tokens: int = field()
    max_num_seqs: int = field()
    max_prefill_tokens: int = field()
    async_scheduling: bool = field()


@dataclass(frozen=True)
class ParallelSettings:
    """How one model is spread over workers."""

    tensor_parallel_size: int = setting(1, "workers that share every layer's weights and heads", low=1, short="-tp")
    pipeline_parallel_size: int = setting(1, "stages of consecutive layers, one after another", low=1, short="-pp")

    distributed_executor_backend: str | None = setting(
        None,
        "where workers run: uni in the engine's process, mp in processes of their own, ray on the hosts of a Ray "
        "cluster, or the name of an executor that a plug-in adds (default: uni for one worker, else mp)",
    )
    enable_expert_parallel: bool = setting(
        False,
        "deal out whole experts over all workers of a stage, of all engines, instead of a slice of each",
        short="-ep",
    )

    @property
    def workers_per_replica(self) -> int:
        """Workers that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelSettings):
    """How a model is spread over workers, as it runs: `ParallelSettings` with every field decided."""

    distributed_executor_backend: str = field()


@dataclass(frozen=True)
class ObservabilityConfig:
    """What is counted about the work, and logged of it."""

    disable_log_stats: bool = setting(False, "keep no statistics: no vllm:* metrics, and no periodic line in the log")


@dataclass(frozen=True)
class DeviceConfig:
    """The device that computes."""

    device: str = setting(
        "auto", "cpu, cuda, the name of a platform that a plug-in adds, or auto: a GPU where there is one"
    )


@dataclass(frozen=True)
class CpuSettings:
    """How many threads compute on CPUs, and on which CPUs they run."""

    cpu_threads: int | None = setting(
        None, "threads that compute, per worker (default: physical cores, shared out)", low=1
    )
    cpu_threads_bind: str | None = setting(
        None, "CPUs of the threads: auto, nobind, or a list per worker of this machine, such as 0-3|4-7 (default: auto)"
    )


@dataclass(frozen=True, kw_only=True)
class CpuConfig(CpuSettings):
    """`CpuSettings`, resolved: the CPUs are nobind or lists."""

    cpu_threads: int = field()
    cpu_threads_bind: str = field()

    def cpus_of(self, worker: int) -> tuple[int, ...]:
        """CPUs that this worker of an engine is bound to; empty: it is not."""
        lists = parse_lists(self.cpu_threads_bind)
        return lists[worker] if lists else ()

    def of_engine(self, number: int, num_workers: int) -> "CpuConfig":
        """With the lists of one engine alone: the `number`-th of this machine, which has `num_workers`."""
        lists = parse_lists(self.cpu_threads_bind)
        if not lists:
            return self
        own = lists[number * num_workers : (number + 1) * num_workers]
        return replace(self, cpu_threads_bind=join_lists(own))


@dataclass(frozen=True)
class EngineSettings:
    """The sections of an engine, as users ask for them: the one list of sections."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    parallel: ParallelSettings = ParallelSettings()
    observability: ObservabilityConfig = ObservabilityConfig()
    device: DeviceConfig = DeviceConfig()
    graphs: GraphSettings = GRAPHS
    cpu: CpuSettings = CpuSettings()
    speculation: SpeculationSettings = SPECULATION
