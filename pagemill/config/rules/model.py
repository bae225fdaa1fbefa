"""Rules of the model: what it is used for, its type, its length, and how prompts become vectors."""

from pagemill.config.choices import Convert, Runner
from pagemill.config.decisions import Decisions, completed
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.rules.pooling import resolve_convert, resolve_pooler
from pagemill.config.sections import AttentionConfig, ModelConfig, ModelSettings
from pagemill.config.structured_outputs import resolve_structured_outputs
from pagemill.errors import ConfigError


def resolve_model(asked: ModelSettings, facts: ModelFacts, device: DeviceFacts, decisions: Decisions) -> ModelConfig:
    """The section, complete. Raises ConfigError."""
    _check_attention(asked.attention_backend, asked.attention_config)
    runner = _runner(asked.runner, asked.convert, facts, decisions)
    convert = resolve_convert(asked.convert, runner, facts, decisions)
    return completed(
        ModelConfig,
        asked,
        runner=runner,
        convert=convert,
        pooler_config=resolve_pooler(asked.pooler_config, convert, runner, facts, decisions),
        dtype=_dtype(asked, facts, device, decisions),
        deterministic=_deterministic(asked.deterministic, device, decisions),
        structured_outputs_config=resolve_structured_outputs(asked.structured_outputs_config),
        max_model_len=_max_model_len(asked.max_model_len, runner, facts, decisions),
    )


def _runner(asked: Runner, convert: Convert, facts: ModelFacts, decisions: Decisions) -> Runner:
    if asked is Runner.GENERATE and not facts.has_head:
        raise ConfigError(
            f"runner='generate' needs an output head, and {facts.name} has none: it is for embeddings only; "
            "use --runner pooling"
        )
    if asked is not Runner.AUTO:
        return asked
    if convert not in (Convert.AUTO, Convert.NONE):
        return decisions.note("runner", Runner.POOLING, f"convert={convert}")
    if facts.has_head and facts.pooling_type is None:
        return decisions.note("runner", Runner.GENERATE, "default")
    return decisions.note("runner", Runner.POOLING, "the model makes vectors or classes")


def _dtype(asked: ModelSettings, facts: ModelFacts, device: DeviceFacts, decisions: Decisions) -> str:
    if asked.dtype != "auto":
        return asked.dtype
    quantization = asked.quantization
    in_gguf = quantization is None and facts.weights_format == "gguf" and facts.dtype == "bfloat16"
    in_file = in_gguf or (facts.quant_method is not None and quantization in (None, facts.quant_method))
    if device.quantized_dtype and (in_file or str(quantization).startswith("int")):
        return decisions.note("dtype", device.quantized_dtype, "beside quantized weights")
    if facts.dtype in device.fast_dtypes:
        return decisions.note("dtype", facts.dtype, "as in the checkpoint")
    return decisions.note("dtype", device.fast_dtypes[0], f"{facts.dtype} is slow on this {device.kind}")


def _deterministic(asked: bool, device: DeviceFacts, decisions: Decisions) -> bool:
    if not asked and device.deterministic:
        return decisions.note("deterministic", True, "PAGEMILL_BATCH_INVARIANT, or VLLM_BATCH_INVARIANT, is 1")
    return asked


def _max_model_len(asked: int | None, runner: Runner, facts: ModelFacts, decisions: Decisions) -> int:
    length = facts.max_position if asked is None else asked
    if runner is not Runner.POOLING and length < 2:
        raise ConfigError(f"max_model_len={length} is not allowed: text needs room for 2 tokens, "
                          "one of the prompt and one of the output; use --max-model-len 2 or more")  # fmt: skip
    if asked is None:
        return decisions.note("max_model_len", length, "the model's")
    if asked > facts.max_position:
        raise ConfigError(
            f"max_model_len={asked} is more than the model's {facts.max_position} positions; "
            f"use --max-model-len {facts.max_position} or less"
        )
    return asked


def _check_attention(backend: str | None, config: AttentionConfig) -> None:
    if backend is not None and config.backend is not None:
        raise ConfigError(
            f"attention_backend={backend!r} and attention_config.backend={config.backend!r} are "
            "mutually exclusive; use one of them"
        )
    if config.flash_attn_version not in (None, 2, 3):
        raise ConfigError(f"attention_config.flash_attn_version={config.flash_attn_version} is not allowed: 2 or 3")
