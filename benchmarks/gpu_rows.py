"""The rows of benchmarks/gpu.py: which engine settings, which work, and what is good enough.

Knows no engine. The recorded figures of the reference (vLLM 0.26.0, one H200, dummy weights, bfloat16) stand in where
it does not run beside ours.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"

COMMON = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 4096, "seed": 0}
"""Settings of every row, which both engines know by these names."""
OWN = {"device": "cuda", "max_num_seqs": 1024}
"""For ours alone; the reference's own default is 1,024 requests, too."""
OWN_WORKS = frozenset({"busy_1", "busy_256", "busy_1024", "memory", "stress"})
"""Works that look inside our engine, or that the reference is not asked to do."""


@dataclass(frozen=True)
class Setup:
    """What one engine process is started with. Rows of one setup share the process."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Over COMMON; for both engines."""
    num_gpus: int = 1
    num_starts: int = 1
    """Times that it is started, one after the other; with more than one, the first finds all caches empty."""

    def settings_of(self, engine: str) -> dict[str, Any]:
        """Arguments of `LLM` in the engine "ours" or "reference"."""
        return COMMON | (OWN if engine == "ours" else {}) | self.settings

    @property
    def folder(self) -> Path:
        """The model's folder, which holds nothing but a config.json."""
        return CONFIGS / self.model


@dataclass(frozen=True)
class Goal:
    """When a figure is good enough."""

    figure: str
    unit: str
    ratio: float | None = None
    """At least this times the reference's figure."""
    least: float | None = None
    most: float | None = None
    recorded: float | None = None
    """The reference's figure, where it was measured before."""


@dataclass(frozen=True)
class Row:
    """One measurement: a work (see engines/gpu_engine.py) on a setup."""

    name: str
    setup: Setup
    work: str
    goals: tuple[Goal, ...]


@dataclass(frozen=True)
class Script:
    """One measurement that is a script of its own; its last line of output is kept, all of it is logged."""

    name: str
    command: tuple[str, ...]


LLAMA = Setup("llama-3.2-1b", "llama-3.2-1b")
QWEN = Setup("qwen3-8b", "qwen3-8b")
LONG = Setup("qwen3-8b-long", "qwen3-8b", {"max_model_len": 20_480})
FP8 = Setup("qwen3-8b-fp8", "qwen3-8b", {"quantization": "fp8"})
FP8_BLOCKS = Setup("qwen3-8b-fp8-blocks", "qwen3-8b", {"quantization": "fp8_per_block"})
W4A16 = Setup("qwen3-8b-w4a16", "qwen3-8b-w4a16")
W4A16_INT8 = Setup("qwen3-8b-w4a16-int8", "qwen3-8b-w4a16", {"quantization": "int8"})
MOE = Setup("qwen3-30b-a3b", "qwen3-30b-a3b")
MOE_FP8 = Setup("qwen3-30b-a3b-fp8", "qwen3-30b-a3b", {"quantization": "fp8"})
EAGER = Setup("qwen3-8b-eager", "qwen3-8b", {"enforce_eager": True})
START_LLAMA = Setup("start-llama-3.2-1b", "llama-3.2-1b", num_starts=2)
START_QWEN = Setup("start-qwen3-8b", "qwen3-8b", num_starts=2)
TWICE_16 = Setup("twice-16-qwen3-8b", "qwen3-8b")
TWICE_CHATS = Setup("twice-chats-qwen3-8b", "qwen3-8b")
STRESS = Setup("stress-qwen3-8b", "qwen3-8b", {"gpu_memory_utilization": 0.95})
TP2 = Setup("qwen3-8b-tp2", "qwen3-8b", {"tensor_parallel_size": 2}, num_gpus=2)
TP4 = Setup("qwen3-8b-tp4", "qwen3-8b", {"tensor_parallel_size": 4}, num_gpus=4)
PP2 = Setup("qwen3-8b-pp2", "qwen3-8b", {"pipeline_parallel_size": 2}, num_gpus=2)
EP2 = Setup(
    "qwen3-30b-a3b-ep2", "qwen3-30b-a3b", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, num_gpus=2
)

TOKENS = "tokens/s"


def _decode(least: float | None = None, ratio: float | None = None, recorded: float | None = None) -> tuple[Goal, ...]:
    return (Goal("decode_tokens_per_s", TOKENS, ratio=ratio, least=least, recorded=recorded),)


def _many(ratio: float | None = None, recorded: float | None = None) -> tuple[Goal, ...]:
    return (Goal("output_tokens_per_s", TOKENS, ratio=ratio, recorded=recorded),)


def _few(*recorded: float) -> tuple[Goal, ...]:
    return tuple(
        Goal(f"output_tokens_per_s_{count}", TOKENS, ratio=ratio, recorded=figure)
        for count, ratio, figure in zip((8, 32, 64), (1.2, 1.1, 1.1), recorded, strict=True)
    )


def _sampled(recorded: float) -> tuple[Goal, ...]:
    return (Goal("output_tokens_per_s", TOKENS, recorded=recorded), Goal("share_of_greedy", "", least=0.98))


def _first_token(short: float, recorded: float, recorded_2048: float) -> tuple[Goal, ...]:
    return (
        Goal("first_token_128_ms", "ms", most=short, recorded=recorded),
        Goal("first_token_2048_ms", "ms", recorded=recorded_2048),
    )


def _start(cold: float, warm: float, recorded: tuple[float, float]) -> tuple[Goal, ...]:
    return (
        Goal("first_start_s", "s", most=cold, recorded=recorded[0]),
        Goal("warm_start_s", "s", most=warm, recorded=recorded[1]),
    )


def _seeded(least: float) -> tuple[Goal, ...]:
    return (
        Goal("least_share", "", least=least),
        *(Goal(f"share_{name}", "") for name in ("temperature", "top_p", "top_k_top_p", "min_p", "mix")),
    )


TWICE = (Goal("second_of_first", "", least=0.97), Goal("first_s", "s"), Goal("second_s", "s"))
BUSY = (Goal("busy_share", "", least=0.97), Goal("step_ms", "ms"))
LONG_FIRST_TOKEN = (Goal("first_token_8192_ms", "ms", most=210), Goal("first_token_16384_ms", "ms", most=495))
MEMORY = (Goal("peak_share_of_budget", "", least=0.95, most=1.0), Goal("used_gib", "GiB"))

ROWS: tuple[Row, ...] = (
    Row("smoke", LLAMA, "smoke", _decode()),
    Row("1b-batch1", LLAMA, "single", _decode(least=1150, recorded=819)),
    Row("1b-first-token", LLAMA, "first_token", _first_token(3.0, 5.0, 12.1)),
    Row("1b-256", LLAMA, "many_256", _many(1.25, 45_122)),
    Row("1b-256-sampled", LLAMA, "sampled_256", _sampled(42_423)),
    Row("1b-256-seeded", LLAMA, "seeded_256", _seeded(0.95)),
    Row("1b-few", LLAMA, "few", _few(5_686, 17_611, 26_925)),
    Row("1b-prefill", LLAMA, "prefill", (Goal("prompt_tokens_per_s", TOKENS, ratio=1.0, recorded=268_623),)),
    Row("1b-1024", LLAMA, "many_1024", _many(1.0, 30_326)),
    Row("1b-busy", LLAMA, "busy_256", BUSY),
    Row("1b-busy-1024", LLAMA, "busy_1024", BUSY),
    Row("8b-batch1", QWEN, "single", _decode(least=240, recorded=197)),
    Row("8b-first-token", QWEN, "first_token", _first_token(7.0, 9.6, 49.9)),
    Row("8b-256", QWEN, "many_256", _many(1.05, 9_806)),
    Row("8b-256-sampled", QWEN, "sampled_256", _sampled(9_583)),
    Row("8b-256-seeded", QWEN, "seeded_256", _seeded(0.98)),
    Row("8b-few", QWEN, "few", _few(1_399, 4_295, 6_516)),
    Row("8b-prefill", QWEN, "prefill", (Goal("prompt_tokens_per_s", TOKENS, ratio=1.0, recorded=44_000),)),
    Row("8b-1024", QWEN, "many_1024", _many(1.0, 7_160)),
    Row("8b-busy-1", QWEN, "busy_1", (Goal("busy_share", ""), Goal("step_ms", "ms"))),
    Row("8b-busy", QWEN, "busy_256", BUSY),
    Row("8b-busy-1024", QWEN, "busy_1024", BUSY),
    Row("8b-memory", QWEN, "memory", MEMORY),
    Row("8b-long-first-token", LONG, "first_token_long", LONG_FIRST_TOKEN),
    Row("8b-long-4k", LONG, "long_4k", _many(1.05)),
    Row("8b-long-16k", LONG, "long_16k", _many(1.05)),
    Row("8b-fp8-batch1", FP8, "single", _decode(ratio=1.3, recorded=271)),
    Row("8b-fp8-256", FP8, "many_256", _many(1.05, 12_381)),
    Row("8b-fp8-few", FP8, "few", _few(1_942, 5_269, 8_572)),
    Row("8b-fp8-busy", FP8, "busy_256", BUSY),
    Row("8b-fp8-blocks-busy", FP8_BLOCKS, "busy_256", BUSY),
    Row("8b-fp8-blocks-batch1", FP8_BLOCKS, "single", _decode(least=348)),
    Row("8b-fp8-blocks-256", FP8_BLOCKS, "many_256", (Goal("output_tokens_per_s", TOKENS, least=13_546),)),
    Row("8b-w4a16-batch1", W4A16, "single", _decode(least=476)),
    Row("8b-w4a16-int8-batch1", W4A16_INT8, "single", _decode(least=476)),
    Row("8b-w4a16-busy-1", W4A16, "busy_1", (Goal("busy_share", ""), Goal("step_ms", "ms"))),
    Row("8b-w4a16-256", W4A16, "many_256", (Goal("output_tokens_per_s", TOKENS, least=9_230),)),
    Row("30b-batch1", MOE, "single", _decode(ratio=1.25, recorded=244)),
    Row("30b-256", MOE, "many_256", _many(1.1, 8_323)),
    Row("30b-first-token", MOE, "first_token", _first_token(21.5, 21.5, 42.6)),
    Row("30b-fp8-batch1", MOE_FP8, "single", _decode()),
    Row("30b-fp8-256", MOE_FP8, "many_256", _many()),
    Row(
        "30b-fp8-first-token",
        MOE_FP8,
        "first_token",
        (Goal("first_token_128_ms", "ms"), Goal("first_token_2048_ms", "ms")),
    ),
    Row("8b-eager-batch1", EAGER, "single", _decode(recorded=85)),
    Row("1b-start", START_LLAMA, "start", _start(20.0, 8.0, (106.8, 25.8))),
    Row("8b-start", START_QWEN, "start", _start(10.0, 6.0, (56.5, 24.3))),
    Row("8b-twice-16", TWICE_16, "twice_16", TWICE),
    Row("8b-twice-chats", TWICE_CHATS, "twice_chats", TWICE),
    Row("8b-stress", STRESS, "stress", (Goal("num_finished", "", least=600),)),
    Row("8b-tp2-batch1", TP2, "single", _decode()),
    Row("8b-tp2-256", TP2, "many_256", _many()),
    Row("8b-tp4-batch1", TP4, "single", _decode()),
    Row("8b-tp4-256", TP4, "many_256", _many()),
    Row("8b-pp2-256", PP2, "many_256", _many()),
    Row("30b-ep2-batch1", EP2, "single", _decode()),
    Row("30b-ep2-256", EP2, "many_256", _many()),
)

SCRIPTS: tuple[Script, ...] = (
    Script("attention", ("benchmarks/gpu_attention.py",)),
    Script("kernels", ("benchmarks/gpu_kernels.py",)),
    Script("1b-http", ("benchmarks/gpu_http.py", "--servers", "1,auto")),
    Script("8b-http", ("benchmarks/gpu_http.py", "--model", "qwen3-8b", "--servers", "1,auto")),
)

BY_NAME: dict[str, Row | Script] = {row.name: row for row in (*ROWS, *SCRIPTS)}
