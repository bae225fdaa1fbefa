"""The sections of the configuration. A field's help text is its documentation; flags and docs come from it.

What users ask for is a section whose open fields are None, such as `CacheSettings`. What runs is the same section with
those fields filled in by `resolve`, such as `CacheConfig`: a subclass that names them again, without None and without a
default. A section of which nothing is filled in is one class, such as `KVEventsConfig`. `EngineSettings`, at the end,
lists the sections (docs/adr/0004-settings-and-config.md).
"""

from dataclasses import dataclass, field, replace

from pagemill.config.choices import Convert, HashAlgorithm, LogprobsMode, Runner, SchedulingPolicy
from pagemill.config.fields import setting
from pagemill.config.graph_mode import GraphMode
from pagemill.config.pooling_facts import Activation
from pagemill.config.speculation import SPECULATION, SpeculationSettings
from pagemill.config.structured_outputs import StructuredOutputsConfig
from pagemill.config.thread_lists import join_lists, parse_lists
from pagemill.messages.pooling_params import PoolingTask, PoolingType

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
class PoolerSettings:
    """How a prompt becomes a vector, where a request does not say."""

    pooling_type: PoolingType | None = setting(
        None,
        "which hidden states are read: LAST, CLS (the first), MEAN, ALL (each by itself) or STEP (each that ends a "
        "step) (default: the model's, or LAST)",
        choices=tuple(PoolingType),
    )
    normalize: bool | None = setting(None, "scale vectors to length 1 (default: the model's, or true)")
    use_activation: bool | None = setting(
        None, "make probabilities of the logits of classes, as the model says (default: true)"
    )
    dimensions: int | None = setting(
        None, "only the first so many numbers of a vector, where a request does not say (default: all)", low=1
    )
    step_tag_id: int | None = setting(None, "the token that ends a step (STEP)", low=0)
    returned_token_ids: tuple[int, ...] = setting((), "of classes, only these, by their numbers (default: all)")
    enable_chunked_processing: bool = setting(
        False,
        "split texts that are longer than the model's context, and take the mean of their parts' vectors, weighted by "
        "their tokens",
    )
    max_embed_len: int | None = setting(
        None, "most tokens of a text that is split (default: 64 times the model's context)", low=1
    )


@dataclass(frozen=True, kw_only=True)
class PoolerConfig(PoolerSettings):
    """How vectors are made, as it runs: `PoolerSettings` with every field decided."""

    pooling_type: PoolingType = field()
    normalize: bool = field()
    use_activation: bool = field(default=True)
    task: PoolingTask = field(default=PoolingTask.EMBED)
    """What the model does."""
    num_outputs: int = field(default=0)
    """Numbers of a row; 0: those of a hidden state."""
    activation: Activation = field(default=Activation.NONE)
    """What `use_activation` stands for."""
    labels: tuple[str, ...] = field(default=())
    """Names of the classes, where it tells them apart."""
    pairs: bool = field(default=False)
    """Whether two texts are scored together, by one class; otherwise their vectors are compared."""


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model: str = setting("smollm2", "alias, folder in Hugging Face format, .gguf file, or hub id")
    tokenizer: str | None = setting(None, "folder, .gguf file or hub id of the tokenizer (default: the model's)")
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: prompts are token ids, and outputs have no text")
    dtype: str = setting("auto", "type of weights and activations", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "precision of weights: none dequantizes a quantized file; int8, int4, int4_g64, int4_g128 (on CPUs), fp8 and "
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
class KVEventsConfig:
    """Events about the prefix cache, for subscribers outside; they carry the tokens of prompts."""

    enable_kv_cache_events: bool = setting(False, "publish what is cached and what no longer is")
    publisher: str = setting("zmq", "what events are published with; null publishes nothing", choices=("zmq", "null"))
    endpoint: str = setting(
        "tcp://127.0.0.1:5557",
        "where subscribers connect: tcp://ADDRESS:PORT, tcp://*:PORT for every network, or ipc://PATH; with a host "
        "name the publisher connects, to a subscriber that binds; the data-parallel rank is added to the port",
    )
    replay_endpoint: str | None = setting(None, "where missed batches can be asked for (default: nowhere)")
    buffer_steps: int = setting(10_000, "batches kept for replay", low=1)
    hwm: int = setting(100_000, "batches that may wait for one slow subscriber before it misses some", low=1)
    max_queue_size: int = setting(100_000, "batches that may wait to be published before some are dropped", low=1)
    topic: str = setting("", "first frame of every message, by which subscribers choose")
    curve_secret_key_file: str | None = setting(
        None,
        "file with the secret key of the endpoints, 40 characters as zmq.curve_keypair() makes them: all is encrypted, "
        "and only subscribers of curve_client_keys_file come in (default: whoever can connect)",
    )
    curve_client_keys_file: str | None = setting(
        None, "file with the public keys of the subscribers that may connect, one a line"
    )

    @property
    def active(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


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
    max_num_seqs: int = setting(128, "most requests that run at once", low=1)
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


ATTENTION_OP = "pagemill::attention"
"""The operation that stands for every attention layer in compiled code."""


@dataclass(frozen=True)
class PassConfig:
    """What the compiler may do that needs to see more than a piece of the model."""

    fuse_attn: bool = setting(
        False, "hand the compiler the model in one piece, attention included: the same as no splitting_ops"
    )


@dataclass(frozen=True)
class CompilationSettings:
    """How the model is compiled and captured. What is not set here follows from the optimization level."""

    mode: int | None = setting(
        None, "0: layers run as they are written; 3: torch.compile, cut at splitting_ops (default: by level)", low=0
    )
    backend: str = setting("inductor", "what compiles a piece", choices=("inductor", "eager"))
    cudagraph_mode: GraphMode | None = setting(
        None,
        "which steps are replayed from CUDA graphs, and how much of them (default: by level)",
        choices=tuple(GraphMode),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, "numbers of tokens for which there are graphs; smaller batches are padded (default: 1, 2, 4, 8, 16, ...)"
    )
    max_cudagraph_capture_size: int | None = setting(
        None,
        "largest number of tokens for which there is a graph (default: twice max_num_seqs, at most 512, but at least "
        "max_num_seqs)",
        low=1,
    )
    cudagraph_num_of_warmups: int = setting(
        0, "steps of a shape that run before it is captured (0: one, of the first of each kind)", low=0
    )
    cudagraph_lazy_capture: bool = setting(
        True, "capture the usual sizes before the first request and others while idle; otherwise all before"
    )
    splitting_ops: tuple[str, ...] | None = setting(
        None, f"operations at which the model is cut; an empty list: nowhere (default: {ATTENTION_OP})"
    )
    pass_config: PassConfig = setting(PassConfig(), "JSON object: what the compiler may do across pieces")
    cache_dir: str | None = setting(None, "folder for compiled code (default: in the cache of pagemill)")
    debug_dump_path: str | None = setting(None, "folder for the graphs of the compiler, as text (default: nowhere)")


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(CompilationSettings):
    """Compilation and graphs as they run: `CompilationSettings` with every field decided."""

    mode: int = field()
    cudagraph_mode: GraphMode = field()
    cudagraph_capture_sizes: tuple[int, ...] = field()
    max_cudagraph_capture_size: int = field()
    splitting_ops: tuple[str, ...] = field()

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut at attention, so that pieces of it can be captured."""
        return self.splitting_ops != ()


@dataclass(frozen=True)
class GraphSettings:
    """Compilation and CUDA graphs. Explicit settings come before the optimization level."""

    optimization_level: int = setting(
        2,
        "0: eager; 1: CUDA graphs between attention layers; 2: and whole decode steps; 3: and torch.compile",
        low=0,
        short="-O",
    )
    enforce_eager: bool = setting(False, "no compilation and no CUDA graphs, whatever the level")
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, "numbers of tokens for which there are graphs; the same as in compilation_config"
    )
    max_cudagraph_capture_size: int | None = setting(
        None, "largest number of tokens for which there is a graph; the same as in compilation_config", low=1
    )
    cudagraph_metrics: bool = setting(False, "log now and then how many steps ran in which mode, and the padding")
    compilation_config: CompilationSettings = setting(
        CompilationSettings(), "JSON object, or one field at a time as -cc.FIELD VALUE", short="-cc"
    )


@dataclass(frozen=True, kw_only=True)
class GraphConfig(GraphSettings):
    """`GraphSettings`, resolved: what runs is in `compilation_config`."""

    compilation_config: CompilationConfig = field()


BALANCERS = ("prefix", "queue", "round_robin")


@dataclass(frozen=True)
class FleetConfig:
    """The processes of a server: how many, and what is done when one shows no sign of life."""

    data_parallel_size: int = setting(1, "engines that each hold the whole model", low=1, short="-dp")
    data_parallel_balancer: str = setting(
        "prefix",
        "which engine gets a request: the one that has its prefix unless it is busy, the one with the shortest queue, "
        "or the next",
        choices=BALANCERS,
    )
    data_parallel_lockstep: bool | None = setting(
        None, "engines step together, in waves (default: where experts are dealt out over them)"
    )
    data_parallel_size_local: int | None = setting(
        None,
        "how many of the data_parallel_size engines run on this machine (default: all; headless: those from "
        "the start rank on)",
        low=0,
        short="-dpl",
    )
    data_parallel_start_rank: int | None = setting(
        None, "rank of the first engine of this machine; the head has those from 0 on", low=0, short="-dpr"
    )
    data_parallel_address: str | None = setting(
        None, "address of the head, where the machines with the other engines connect", short="-dpa"
    )
    data_parallel_rpc_port: int = setting(
        29550, "port on the head where the machines with the other engines connect", low=1, short="-dpp"
    )
    data_parallel_node_timeout: float = setting(
        10.0,
        "seconds without a message after which the head of a server and a machine with other engines take "
        "each other for gone",
        low=1,
    )
    headless: bool = setting(False, "run engines only, for the API servers of a head on another machine")
    api_server_count: int | str | None = setting(
        None,
        "processes that take HTTP requests (default: as many as engines); auto: by the cores and the speed of the "
        "engine's device",
        low=1,
        short="-asc",
        words=("auto",),
    )
    engine_start_timeout: float = setting(
        3600.0,
        "seconds that a process of the server may take to start (an engine: to load its model and be ready) before it "
        "is killed; 0: no limit",
        low=0,
    )
    engine_stall_timeout: float = setting(
        60.0, "seconds without a finished step, with work waiting, after which /health answers 503; 0: never", low=0
    )
    engine_hang_timeout: float = setting(
        300.0,
        "seconds without a finished step, with work waiting, after which the engine is restarted; 0: never",
        low=0,
    )

    @property
    def num_api_servers(self) -> int:
        """`api_server_count`, or its default. Raises ValueError while it is auto."""
        return int(self.api_server_count or self.data_parallel_size)


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
    graphs: GraphSettings = GraphSettings()
    cpu: CpuSettings = CpuSettings()
    speculation: SpeculationSettings = SPECULATION
