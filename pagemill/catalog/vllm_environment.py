"""Variables of vLLM's environment: those that are read, where else the same is said, or why nothing follows.

Start-up tells those that are set (launch.py), and docs/compat.md lists all. Names are without the prefix VLLM_.
"""

from typing import Final

READ: Final = frozenset(
    [
        "API_KEY",
        "BATCH_INVARIANT",
        "CACHE_ROOT",
        "CPU_OMP_THREADS_BIND",
        "LOGGING_LEVEL",
        "LOG_STATS_INTERVAL",
        "PLUGINS",
        "RPC_BASE_PATH",
        "SERVER_DEV_MODE",
        "TORCH_PROFILER_DIR",
    ]
)
"""Those that `pagemill.envs` reads."""

_ELSEWHERE: Final[tuple[tuple[str, str], ...]] = (
    ("use --data-parallel-address", "HOST_IP"),
    ("use --data-parallel-rpc-port", "PORT"),
    ("use --engine-start-timeout", "ENGINE_READY_TIMEOUT_S"),
    ("use --engine-hang-timeout", "EXECUTE_MODEL_TIMEOUT_SECONDS"),
    ("use --timeout-keep-alive", "HTTP_TIMEOUT_KEEP_ALIVE"),
    ("use --kv-cache-memory-bytes", "CPU_KVCACHE_SPACE"),
    ("use --cpu-threads, or --cpu-threads-bind", "CPU_NUM_OF_RESERVED_CPU"),
    ("use --attention-backend", "ATTENTION_BACKEND"),
    ("use --distributed-executor-backend: mp gives workers processes of their own", "ENABLE_V1_MULTIPROCESSING"),
    ("use --compilation-config, whose cache_dir is where compiled code is kept", "DISABLE_COMPILE_CACHE"),
    ("PAGEMILL_LOGGING_LEVEL says how much is logged, to stderr", "CONFIGURE_LOGGING LOGGING_CONFIG_PATH"),
)  # fmt: skip

_IDLE: Final[tuple[tuple[str, str], ...]] = (
    ("nothing is sent anywhere", "NO_USAGE_STATS DO_NOT_TRACK"),
    ("there is one engine", "USE_V1"),
    ("every process is a fresh interpreter", "WORKER_MULTIPROC_METHOD"),
    ("an engine that dies is started again, and the server stays", "KEEP_ALIVE_ON_ENGINE_DEATH"),
    ("outputs are handled in slices of time", "V1_OUTPUT_PROC_CHUNK_SIZE"),
    ("there is no all-reduce of our own", "SKIP_P2P_CHECK"),
    ("parsers of tool calls take linear time", "TOOL_PARSE_REGEX_TIMEOUT_SECONDS"),
    ("models here take text only; nothing is fetched and no media are read",
     "IMAGE_FETCH_TIMEOUT VIDEO_FETCH_TIMEOUT AUDIO_FETCH_TIMEOUT MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS "
     "MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_DURATION_S MAX_AUDIO_DECODE_BYTES "
     "MAX_IMAGE_PIXELS MAX_EMBED_DECODE_BYTES"),
)  # fmt: skip

_REFUSED: Final[tuple[tuple[str, str], ...]] = (
    ("adapters are not loaded yet",
     "ALLOW_RUNTIME_LORA_UPDATING LORA_RESOLVER_CACHE_DIR LORA_RESOLVER_HF_REPO_LIST"),
    ("use --response-store-bytes, which says how much is stored", "ENABLE_RESPONSES_API_STORE"),
    ("32-bit floats are computed as they are", "FLOAT32_MATMUL_PRECISION"),
    ("limits of requests are fixed: docs/http-api.md",
     "MAX_N_SEQUENCES MAX_COMPLETION_PROMPTS MAX_STOP_STRINGS MAX_NUM_BAD_WORDS MAX_BAD_WORDS_TOTAL_TOKENS"),
    ("grammars have limits of their own: docs/structured-output.md",
     "REGEX_COMPILATION_TIMEOUT_S XGRAMMAR_CACHE_MB"),
    ("chat templates have limits of their own", "CHAT_TEMPLATE_RENDER_TIMEOUT"),
    ("nothing that is received is unpickled", "ALLOW_INSECURE_SERIALIZATION"),
    ("models come from folders, files or the Hugging Face hub; HF_ENDPOINT names a mirror of it", "USE_MODELSCOPE"),
    ("hashes in events are numbers of 64 bits, always", "KV_EVENTS_USE_INT_BLOCK_HASHES"),
    ("use --hf-overrides for a model that can do more than its configuration says", "ALLOW_LONG_MAX_MODEL_LEN"),
)  # fmt: skip


def _by_name(groups: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: text for text, names in groups for name in names.split()}


ELSEWHERE: Final = _by_name(_ELSEWHERE)
"""Name -> where the same is said."""
IDLE: Final = _by_name(_IDLE)
"""Name -> why it cannot matter."""
REFUSED: Final = _by_name(_REFUSED)
"""Name -> why it has no effect here."""


def why_unread(variable: str) -> str:
    """What to say of a variable (`VLLM_USE_V1`) that is set and not read."""
    name = variable.partition("_")[2]
    for table in (ELSEWHERE, IDLE, REFUSED):
        if name in table and variable.startswith("VLLM_"):
            return table[name]
    return "nothing reads this variable of the environment"
