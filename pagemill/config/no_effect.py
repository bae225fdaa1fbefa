"""Settings that cannot matter, on this device, for this model, or at all: accepted, listed in docs/compat.md, and told
at start-up when they were given.

Does not know how settings take effect; a test asks that every setting either does or is here.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from pagemill.catalog.platforms import CPU
from pagemill.config.fields import setting
from pagemill.config.sections import CacheConfig, ModelConfig


@dataclass(frozen=True)
class CompatConfig:
    """Settings of vLLM that change nothing here, whatever they are; accepted so that scripts need no editing."""

    code_revision: str | None = setting(None, "code of a repository is never run")
    tokenizer_mode: str = setting("auto", "there is one kind of tokenizer", choices=("auto", "hf"))
    config_format: str = setting("auto", "the format of a model's files is found out", choices=("auto", "hf"))
    allow_deprecated_quantization: bool = setting(False, "no way to quantize is deprecated")
    safetensors_load_strategy: str | None = setting(None, "files are mapped, and read as they are needed")
    safetensors_prefetch_num_threads: int | None = setting(None, "files are mapped, and read as they are needed")
    safetensors_prefetch_block_size: int | None = setting(None, "files are mapped, and read as they are needed")
    pt_load_map_location: str | None = setting(None, "pickles are never loaded")
    max_parallel_loading_workers: int | None = setting(None, "every worker reads its own part")
    disable_custom_all_reduce: bool = setting(False, "there is no all-reduce of our own")
    enable_flashinfer_autotune: bool = setting(False, "kernels are chosen before the first request")
    language_model_only: bool = setting(False, "models here take text only")
    limit_mm_per_prompt: dict[str, object] = setting({}, "models here take text only")
    mm_processor_kwargs: dict[str, object] = setting({}, "models here take text only")
    media_io_kwargs: dict[str, object] = setting({}, "models here take text only")
    mm_processor_cache_gb: float | None = setting(None, "models here take text only")
    skip_mm_profiling: bool = setting(False, "models here take text only")
    allowed_local_media_path: str | None = setting(None, "models here take text only, and files are never read")
    allowed_media_domains: tuple[str, ...] | None = setting(None, "models here take text only; nothing is fetched")
    enable_prompt_tokens_details: bool = setting(False, "usage.prompt_tokens_details is always there")
    enable_request_id_headers: bool = setting(False, "every answer has the header X-Request-Id")
    enable_server_load_tracking: bool = setting(False, "/load always answers")
    enable_offline_docs: bool = setting(False, "/docs never loads anything from elsewhere")
    disable_log_requests: bool = setting(False, "requests are logged with --enable-log-requests only")


class Place(NamedTuple):
    """Where settings take effect, or do not."""

    device: str
    model: ModelConfig
    cache: CacheConfig


class Idle(NamedTuple):
    """Settings that cannot matter where `applies` says so."""

    names: tuple[str, ...]
    where: str
    why: str
    applies: Callable[[Place], bool]


class IdleSetting(NamedTuple):
    """One that was given, and does not matter."""

    name: str
    why: str


def _on_cpu(place: Place) -> bool:
    return place.device == CPU


def _is_local(place: Place) -> bool:
    return _is_here(place.model.model)


def _tokenizer_is_local(place: Place) -> bool:
    return _is_here(place.model.tokenizer or place.model.model)


def _is_here(name: str) -> bool:
    """Whether a model is not one of the hub: an alias, a folder, a file."""
    return "/" not in name or Path(name).expanduser().exists()


IDLE: tuple[Idle, ...] = (
    Idle(
        ("gpu_memory_utilization",), "on a CPU", "kv_cache_memory_bytes says what a CPU keeps for the cache", _on_cpu
    ),
    Idle(
        (
            "enforce_eager", "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
            "cudagraph_metrics",
        ),
        "on a CPU", "there are no graphs to capture", _on_cpu,
    ),
    Idle(("disable_cascade_attn",), "on a CPU", "there is no cascade attention", _on_cpu),
    Idle(
        (
            "enforce_eager", "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
            "cudagraph_metrics", "compilation_config",
        ),
        "on a GPU, with --runner pooling", "vectors are made without graphs and without a compiler",
        lambda place: place.model.pools and not _on_cpu(place),
    ),
    Idle(("revision",), "with a model on this machine", "it is for the hub", _is_local),
    Idle(("tokenizer_revision",), "with a tokenizer on this machine", "it is for the hub", _tokenizer_is_local),
    Idle(
        ("download_dir", "ignore_patterns"), "with model and tokenizer on this machine", "nothing is fetched",
        lambda place: _is_local(place) and _tokenizer_is_local(place),
    ),
    Idle(
        ("kv_cache_metrics_sample",), "without --kv-cache-metrics", "no blocks are measured",
        lambda place: not place.cache.kv_cache_metrics,
    ),
    Idle(
        ("chat_template", "parse_control_tokens"), "with --skip-tokenizer-init", "there is no text",
        lambda place: place.model.skip_tokenizer_init,
    ),
)  # fmt: skip


def idle_settings(given: Collection[str], place: Place) -> list[IdleSetting]:
    """Those of the settings given by the user that cannot matter."""
    always = {field.name: str(field.metadata["help"]) for field in fields(CompatConfig)}
    found = [IdleSetting(name, why) for name, why in always.items() if name in given]
    for idle in IDLE:
        if idle.applies(place):
            found += [IdleSetting(name, f"{idle.where}: {idle.why}") for name in idle.names if name in given]
    return found
