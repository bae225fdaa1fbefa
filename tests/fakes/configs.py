"""Sections of the configuration as `resolve` makes them, with what a test says in place of what it would fill in."""

from typing import Any, TypeVar

from pagemill.catalog.executors import UNI
from pagemill.catalog.grammars import GUIDANCE
from pagemill.config.choices import Runner
from pagemill.config.decisions import completed
from pagemill.config.graph_config import (
    ATTENTION_OP,
    CompilationConfig,
    CompilationSettings,
    GraphConfig,
    GraphSettings,
)
from pagemill.config.graph_mode import GraphMode
from pagemill.config.pooler_config import PoolerConfig
from pagemill.config.sections import (
    CacheConfig,
    CacheSettings,
    CpuConfig,
    CpuSettings,
    ModelConfig,
    ModelSettings,
    ParallelConfig,
    ParallelSettings,
    SchedulerConfig,
    SchedulerSettings,
)
from pagemill.config.structured_outputs import StructuredOutputsConfig
from pagemill.messages.pooling_params import PoolingType

POOLER = PoolerConfig(pooling_type=PoolingType.LAST, normalize=True)


def model_config(model: str = "smollm2", **settings: object) -> ModelConfig:
    defaults = {"dtype": "float32", "max_model_len": 2048, "runner": Runner.GENERATE, "pooler_config": POOLER}
    defaults["structured_outputs_config"] = StructuredOutputsConfig(GUIDANCE)
    return _completed(ModelConfig, ModelSettings, defaults | {"model": model} | settings)


def cache_config(**settings: object) -> CacheConfig:
    return _completed(CacheConfig, CacheSettings, {"block_size": 16} | settings)


def scheduler_config(**settings: object) -> SchedulerConfig:
    defaults = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_prefill_tokens": 0, "async_scheduling": False}
    return _completed(SchedulerConfig, SchedulerSettings, defaults | settings)


def parallel_config(**settings: object) -> ParallelConfig:
    return _completed(ParallelConfig, ParallelSettings, {"distributed_executor_backend": UNI} | settings)


def cpu_config(cpu_threads: int = 1, cpu_threads_bind: str = "nobind") -> CpuConfig:
    return completed(CpuConfig, CpuSettings(), cpu_threads=cpu_threads, cpu_threads_bind=cpu_threads_bind)


def compilation_config(**settings: object) -> CompilationConfig:
    defaults = {
        "mode": 0,
        "cudagraph_mode": GraphMode.NONE,
        "cudagraph_capture_sizes": (),
        "max_cudagraph_capture_size": 0,
        "splitting_ops": (ATTENTION_OP,),
    }
    return _completed(CompilationConfig, CompilationSettings, defaults | settings)


def graph_config(**compilation: object) -> GraphConfig:
    return completed(GraphConfig, GraphSettings(), compilation_config=compilation_config(**compilation))


C = TypeVar("C")


def _completed(kind: type[C], settings: type[Any], values: dict[str, object]) -> C:
    filled = {name: value for name, value in values.items() if name in kind.__annotations__}
    return completed(kind, settings(**{name: values[name] for name in values.keys() - filled.keys()}), **filled)
