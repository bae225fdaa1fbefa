"""What benchmarks/cpu_peers.py measures, and the rows of its table. Knows nothing about how contestants are started."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
from workload import Sizes

Series = dict[tuple[str, str], list[float]]
"""(contestant, figure) -> its value in each repetition."""
Place = tuple[str, str]
"""A contestant and a figure of its."""

VLLM = "vLLM engine"
VLLM_SERVER = "vLLM server"


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of ours beside the best of the peers' figures."""

    name: str
    what: str
    unit: str
    ours: Place
    peers: tuple[Place, ...] = ()
    more_is_better: bool = True
    ratio_at_least: float | None = None
    """Target: ours / peer where more is better, else peer / ours."""
    ours_at_most: float | None = None
    """Target: ours, whatever the peers do."""


@dataclass(frozen=True)
class Job:
    """Works that are done in turn, repetition by repetition, and the rows that come of them."""

    name: str
    runs: tuple[tuple[str, str], ...]
    """(contestant, work)."""
    rows: tuple[Row, ...]
    needs_vllm: bool = False
    """Whether the rows say little without it."""
    warm_up: bool = False
    """Whether the first repetition is done once more, before: for short works."""
    once: tuple[str, ...] = ()
    """Contestants that take part in the first repetition only: slow peers whose figure is no target's measure."""
    derive: Callable[[Series, Sizes], None] | None = None
    """Adds series that follow from others."""


def all_jobs(folder: Path, files: dict[str, Path]) -> list[Job]:
    """In the order in which contestants can be ended soonest. `folder` has the model's config.json, `files` the model
    as GGUF in every precision."""
    config = json.loads((folder / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * 2 * config["num_key_value_heads"] * head_size * config["num_hidden_layers"]
    decodes = [
        _decode(precision, ratio, share, _matrix_bytes(files[precision]), kv_bytes)
        for precision, ratio, share in (("bf16", 1.05, 0.88), ("8-bit", 1.15, 0.80), ("4-bit", 1.5, 0.65))
    ]
    return [*decodes, _prefill(), _throughput(), _prefix(), _flood(), _served(), _start(), _memory(), _host()]


def _matrix_bytes(path: Path) -> int:
    """Of all matrices; a tied head reads the embedding's once per token."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1)


def _decode(precision: str, ratio: float, share: float, matrix_bytes: int, kv_bytes: int) -> Job:
    ours = (f"ours {precision}", "single_decode")

    def derive(series: Series, sizes: Sizes) -> None:
        per_token = matrix_bytes + kv_bytes * (32 + sizes.decoded / 2)
        series["machine", "roof"] = [gbps * 1e9 / per_token for gbps in series["machine", "read_gbps"]]

    name, what = f"decode_{precision}", f"single-stream decode, {precision}"
    return Job(
        name,
        (ours, (f"llama.cpp {precision}", "single_decode"), ("machine", "read_gbps")),
        (
            Row(name, what, "tokens/s", ours, ((f"llama.cpp {precision}", "single_decode"),), ratio_at_least=ratio),
            Row(
                f"{name}_share", f"{what}: share of read bandwidth", "tokens/s", ours, (("machine", "roof"),),
                ratio_at_least=share,
            ),
            Row(f"{name}_bandwidth", "read bandwidth meanwhile", "GB/s", ("machine", "read_gbps")),
        ),
        warm_up=True,
        derive=derive,
    )  # fmt: skip


def _prefill() -> Job:
    peers = ((VLLM, "prefill"), ("llama.cpp bf16", "prefill"))
    return Job(
        "prefill",
        (("ours bf16", "prefill"), ("ours 8-bit", "prefill"), *peers, ("llama.cpp 8-bit", "prefill")),
        (
            Row(
                "prefill_bf16", "prefill 512 tokens, bf16", "tokens/s", ("ours bf16", "prefill"), peers,
                ratio_at_least=1.1,
            ),
            Row(
                "prefill_8-bit", "prefill 512 tokens, 8-bit", "tokens/s", ("ours 8-bit", "prefill"),
                (*peers, ("llama.cpp 8-bit", "prefill")), ratio_at_least=2.0,
            ),
        ),
        needs_vllm=True,
        warm_up=True,
    )  # fmt: skip


def _throughput() -> Job:
    work, bf16, vllm = "throughput", ("ours bf16", "throughput"), (VLLM, "throughput")
    what = "offline, 64 x (128 + 128)"
    return Job(
        work,
        (bf16, ("ours 8-bit", work), vllm, ("machine", "ceiling")),
        (
            Row("throughput_bf16", f"{what}, bf16", "output tokens/s", bf16, (vllm,), ratio_at_least=1.2),
            Row(
                "throughput_share", f"{what}: share of GEMM + KV read", "output tokens/s", bf16,
                (("machine", "ceiling"),), ratio_at_least=0.85,
            ),
            Row("throughput_8-bit", f"{what}, 8-bit", "output tokens/s", ("ours 8-bit", work), (vllm,),
                ratio_at_least=2.0),
        ),
        needs_vllm=True,
    )  # fmt: skip


def _prefix() -> Job:
    runs = (("ours bf16", "shared_prefix"), (VLLM, "shared_prefix"))

    def derive(series: Series, sizes: Sizes) -> None:
        for contestant, work in runs:
            series[contestant, "seconds"] = [sizes.sharing / rate for rate in series[contestant, work]]

    return Job(
        "shared_prefix",
        runs,
        (
            Row(
                "shared_prefix", "32 at once, 512 shared + 32 + 32 out", "s", ("ours bf16", "seconds"),
                ((VLLM, "seconds"),), more_is_better=False, ratio_at_least=1.5,
            ),
        ),
        needs_vllm=True,
        warm_up=True,
        derive=derive,
    )  # fmt: skip


def _flood() -> Job:
    server, inside = ("ours server bf16", "tokens_per_s"), ("ours bf16", "throughput")
    peers = ("llama.cpp server 64", VLLM_SERVER)
    return Job(
        "http_64",
        (("ours server bf16", "throughput"), inside, *((peer, "throughput") for peer in peers)),
        (
            Row(
                "http_64", "HTTP, 64 at once", "output tokens/s", server,
                tuple((peer, "tokens_per_s") for peer in peers), ratio_at_least=2.0,
            ),
            Row(
                "http_64_share", "HTTP, 64 at once: share of in-process", "output tokens/s", server, (inside,),
                ratio_at_least=0.95,
            ),
        ),
    )  # fmt: skip


def _served() -> Job:
    ours, peers, what = "ours server bf16", ("llama.cpp server 8", VLLM_SERVER), "HTTP, 32 at concurrency 8"

    def row(name: str, figure: str, unit: str, ratio: float) -> Row:
        return Row(
            f"http_8_{name}", f"{what}: {name}", unit, (ours, figure), tuple((peer, figure) for peer in peers),
            more_is_better=figure == "tokens_per_s", ratio_at_least=ratio,
        )  # fmt: skip

    rows = (
        row("rate", "tokens_per_s", "output tokens/s", 1.5),
        row("ttft_p50", "ttft_p50_ms", "ms", 2.0),
        row("itl_p99", "itl_p99_ms", "ms", 1.0),
    )
    return Job("http_8", tuple((who, "served") for who in (ours, *peers)), rows)


def _start() -> Job:
    runs = tuple(
        (who, "start")
        for who in ("ours complete", "llama.cpp complete", "ours fresh server", "llama.cpp fresh server 8")
    )
    (ours, _), (peer, _), (our_server, _), (their_server, _) = runs
    return Job(
        "start",
        runs,
        (
            Row(
                "start", "process start to first token, 4-bit", "s", (ours, "start_s"), ((peer, "start_s"),),
                more_is_better=False, ours_at_most=2.0,
            ),
            Row(
                "start_http", "server start to first token, 4-bit", "s", (our_server, "start_s"),
                ((their_server, "start_s"),), more_is_better=False,
            ),
        ),
        warm_up=True,
    )  # fmt: skip


def _memory() -> Job:
    peers = ("llama.cpp fresh server 64", "transformers fresh engine")
    places = tuple((peer, "pss_gb") for peer in peers)
    return Job(
        "memory",
        tuple((who, "memory") for who in ("ours fresh server", "ours fresh engine", *peers)),
        (
            Row(
                "memory", "PSS of the tree, 4-bit, 64 requests of 256", "GB", ("ours fresh server", "pss_gb"), places,
                more_is_better=False, ours_at_most=1.0,
            ),
            Row(
                "memory_offline", "the same without a server", "GB", ("ours fresh engine", "pss_gb"), places,
                more_is_better=False,
            ),
        ),
        once=("ours fresh engine", *peers),
    )  # fmt: skip


def _host() -> Job:
    rows = (
        Row("host_1", "host time of a step, null model, batch 1", "ms", ("null model", "batch_1_ms"),
            more_is_better=False, ours_at_most=0.3),
        Row("host_1024", "host time of a step, null model, batch 1024", "ms", ("null model", "batch_1024_ms"),
            more_is_better=False, ours_at_most=1.5),
    )  # fmt: skip
    return Job("host", (("null model", "host"),), rows)
