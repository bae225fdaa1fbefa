"""Rules of parallelism: how the model can be split, and where workers run."""

import math

from pagemill.catalog.executors import EXECUTORS, MP, UNI
from pagemill.catalog.models import NATIVE
from pagemill.config.decisions import Decisions, completed
from pagemill.config.facts import ModelFacts
from pagemill.config.sections import ParallelConfig, ParallelSettings
from pagemill.errors import ConfigError

TIED = ("num_kv_shared_layers", "hidden_size_per_layer_input")
"""Fields of a config that say what layers have in common: the keys and values of others, and what is made of a token's
id for each."""


def resolve_parallel(asked: ParallelSettings, facts: ModelFacts, decisions: Decisions) -> ParallelConfig:
    """The section, complete. Raises ConfigError."""
    _check_sizes(asked, facts)
    return completed(ParallelConfig, asked, distributed_executor_backend=_executor(asked, decisions))


def _check_sizes(asked: ParallelSettings, facts: ModelFacts) -> None:
    if asked.enable_expert_parallel and not facts.num_experts:
        raise ConfigError(
            f"enable_expert_parallel=True needs a mixture of experts, and {facts.name} has no experts; leave it out"
        )
    if facts.implementation != NATIVE and (asked.pipeline_parallel_size > 1 or asked.enable_expert_parallel):
        raise ConfigError(
            f"pipeline_parallel_size={asked.pipeline_parallel_size} and enable_expert_parallel="
            f"{asked.enable_expert_parallel} do not fit {facts.name}: a model that {facts.implementation} computes "
            "cannot be cut into stages, nor its experts dealt out; use 1 and false"
        )
    tied = [name for name in TIED if facts.hf_config.get(name)]
    if asked.pipeline_parallel_size > 1 and tied and facts.implementation == NATIVE:
        raise ConfigError(
            f"pipeline_parallel_size={asked.pipeline_parallel_size} does not fit {facts.name}: its layers cannot be on "
            f"several stages, for {tied[0]}={facts.hf_config[tied[0]]} ties them together; use 1"
        )
    if (
        asked.tensor_parallel_size > 1
        and facts.implementation == NATIVE
        and not splits_over(facts, asked.tensor_parallel_size)
    ):
        heads, kv_heads, inner = _split_sizes(facts)
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if splits_over(facts, size))
        raise ConfigError(
            f"tensor_parallel_size={asked.tensor_parallel_size} does not fit num_attention_heads={heads}, "
            f"num_key_value_heads={kv_heads} and intermediate_size={inner} of {facts.name}; allowed: {allowed}"
        )
    num_layers = int(facts.hf_config.get("num_hidden_layers", 1))
    if asked.pipeline_parallel_size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={asked.pipeline_parallel_size} is more than the {num_layers} layers of "
            f"{facts.name}; allowed: 1 to {num_layers}"
        )


def _executor(asked: ParallelSettings, decisions: Decisions) -> str:
    name = asked.distributed_executor_backend
    workers = asked.workers_per_replica
    if name is None:
        return decisions.note("distributed_executor_backend", UNI if workers == 1 else MP, f"{workers} workers")
    if name == UNI and workers > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' runs one worker, and tensor_parallel_size x pipeline_parallel_size "
            f"is {workers}; use --distributed-executor-backend mp"
        )
    EXECUTORS.check(name)
    return name


def splits_over(facts: ModelFacts, tensor_parallel_size: int) -> bool:
    """Whether every rank can have equally many heads and rows; fewer key and value heads than ranks are replicated."""
    heads, kv_heads, inner = _split_sizes(facts)
    kv_fits = kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % kv_heads == 0
    return heads % tensor_parallel_size == 0 and kv_fits and inner % tensor_parallel_size == 0


def _split_sizes(facts: ModelFacts) -> tuple[int, int, int]:
    config = facts.hf_config
    heads = int(config["num_attention_heads"])
    inner = config["intermediate_size"]  # one for all layers, or of each
    sizes = inner if isinstance(inner, list) else [inner]
    return heads, int(config.get("num_key_value_heads") or heads), math.gcd(*sizes)
