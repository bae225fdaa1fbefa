"""What the fields of a model's configuration may hold: one table, checked before anything is made of them.

A configuration comes from a stranger's file. Numbers within these bounds can be wrong (the weights will not fit them),
but cost neither memory nor time nor an exception that names no field. Knows nothing about how a model is computed.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pagemill.errors import ModelError
from pagemill.utils.text import shown

Check = Callable[[Any], bool]
MAX_LAYERS: Final = 1000
MAX_POSITIONS: Final = 2**31 - 2
"""Positions are 32-bit integers; one more than the last must be too."""


class Rule:
    """What one field may hold; `words` say so in messages. Null stands for a field that is not there."""

    def __init__(self, words: str, check: Check) -> None:
        self.words = words
        self._check = check

    def allows(self, value: Any) -> bool:
        """Whether a field may have this value."""
        return value is None or self._check(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int) -> Rule:
    """low <= value <= high."""
    return Rule(f"an integer from {low} to {high}", lambda value: _is_integer(value) and low <= value <= high)


def number(low: float, high: float, words: str | None = None) -> Rule:
    """low < value <= high."""

    def check(value: Any) -> bool:
        is_number = _is_integer(value) or isinstance(value, float)
        return is_number and abs(value) <= high + abs(low) and math.isfinite(value) and low < value <= high

    return Rule(words or f"a number above {low:g} and up to {high:g}", check)


def items(of: Rule, most: int, words: str) -> Rule:
    """A list of at most `most`."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) <= most
            and all(item is not None and of.allows(item) for item in value)
        )

    return Rule(words, check)


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(SCALE.allows(item) for item in value)


def _are_head_sizes(layer: Any, sizes: Any) -> bool:
    rules = {"head_dim": PAIRS, "num_key_value_heads": COUNT}
    return (
        isinstance(layer, str)
        and layer.isdecimal()
        and len(layer) <= len(str(MAX_LAYERS))
        and isinstance(sizes, dict)
        and all(name in rules and rules[name].allows(value) for name, value in sizes.items())
    )


FLAG: Final = Rule("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Rule("a text of up to 200 characters", lambda value: isinstance(value, str) and len(value) <= 200)
OBJECT: Final = Rule("an object", lambda value: isinstance(value, dict))
WIDTH: Final = integer(1, 2**24)
COUNT: Final = integer(1, 2**16)
HEAD: Final = integer(1, 2**14)
PAIRS: Final = Rule("an even integer from 2 to 16384", lambda value: HEAD.allows(value) and value % 2 == 0)
FACTOR: Final = number(0, 1e9)
SCALE: Final = number(-1e9, 1e9, "a number")
THETA: Final = number(1, 1e15)
POSITIONS: Final = integer(1, MAX_POSITIONS)
LAYERS: Final = integer(0, MAX_LAYERS)
PATTERN: Final = Rule(
    "an integer from 0 to 1000 or a text of up to 200 characters",
    lambda value: LAYERS.allows(value) or TEXT.allows(value),
)
LAYER_NUMBER: Final = integer(1, MAX_LAYERS)
WIDTHS: Final = items(WIDTH, MAX_LAYERS, "")
SHARE: Final = Rule("a number from 0, below 1", lambda value: SCALE.allows(value) and 0 <= value < 1)
SHARES: Final = items(SHARE, MAX_LAYERS, "")

FIELDS: Final[dict[str, Rule]] = {
    "hidden_size": WIDTH,
    "intermediate_size": Rule(
        f"{WIDTH.words}, or a list of up to {MAX_LAYERS} of them",
        lambda value: WIDTH.allows(value) or (WIDTHS.allows(value) and len(value) > 0),
    ),
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": PAIRS,
    "vocab_size": integer(1, 2**27),
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": number(0, 1),
    "layer_norm_eps": number(0, 1),
    "layer_norm_elementwise_affine": FLAG,
    "do_layer_norm_before": FLAG,
    "use_parallel_residual": FLAG,
    "rotary_pct": number(0, 1),
    "rotary_emb_base": THETA,
    "ffn_dim": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "activation_function": TEXT,
    "enable_bias": FLAG,
    "rope_theta": THETA,
    "rope_local_base_freq": THETA,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "rope_interleave": FLAG,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "sliding_window": integer(0, MAX_POSITIONS),
    "use_sliding_window": FLAG,
    "max_window_layers": LAYERS,
    "sliding_window_pattern": PATTERN,
    "layer_types": items(TEXT, MAX_LAYERS, f"a list of up to {MAX_LAYERS} names"),
    "query_pre_attn_scalar": FACTOR,
    "attn_logit_softcapping": FACTOR,
    "final_logit_softcapping": FACTOR,
    "use_bidirectional_attention": Rule(
        "true, false, 'all' or 'vision'", lambda value: FLAG.allows(value) or value in ("all", "vision")
    ),
    "partial_rotary_factor": number(0, 1),
    "original_max_position_embeddings": POSITIONS,
    "embedding_multiplier": FACTOR,
    "attention_multiplier": FACTOR,
    "residual_multiplier": FACTOR,
    "logits_scaling": FACTOR,
    "logit_scale": FACTOR,
    "use_qk_norm": FLAG,
    "qk_layernorm": FLAG,
    "use_bias": FLAG,
    "use_qkv_bias": FLAG,
    "qkv_bias": FLAG,
    "bias": FLAG,
    "alibi": FLAG,
    "multi_query": FLAG,
    "parallel_attn": FLAG,
    "new_decoder_architecture": FLAG,
    "num_ln_in_parallel_attn": integer(1, 2),
    "activation": TEXT,
    "scale_attn_weights": FLAG,
    "scale_attn_by_inverse_layer_idx": FLAG,
    "shared_expert_intermediate_size": WIDTH,
    "intermediate_size_mlp": WIDTH,
    "attention_chunk_size": POSITIONS,
    "floor_scale": FACTOR,
    "attn_scale": FACTOR,
    "interleave_moe_layer_step": LAYERS,
    "moe_layers": items(LAYERS, MAX_LAYERS, f"a list of up to {MAX_LAYERS} numbers of layers"),
    "swiglu_alpha": FACTOR,
    "swiglu_limit": FACTOR,
    "num_kv_shared_layers": LAYERS,
    "hidden_size_per_layer_input": integer(0, 2**16),
    "vocab_size_per_layer_input": integer(1, 2**27),
    "altup_num_inputs": integer(1, 64),
    "altup_active_idx": integer(0, 63),
    "altup_correct_scale": FLAG,
    "laurel_rank": WIDTH,
    "activation_sparsity_pattern": Rule(
        f"{SHARE.words}, or a list of up to {MAX_LAYERS} of them",
        lambda value: SHARE.allows(value) or SHARES.allows(value),
    ),
    "per_layer_config": Rule(
        "an object of numbers of layers, each with head_dim (an even integer) and num_key_value_heads or one of them",
        lambda value: isinstance(value, dict) and all(map(_are_head_sizes, value, value.values())),
    ),
    "global_head_dim": PAIRS,
    "num_global_key_value_heads": COUNT,
    "attention_k_eq_v": FLAG,
    "enable_moe_block": FLAG,
    "use_double_wide_mlp": FLAG,
    "top_k_experts": integer(1, 2**10),
    "no_rope_layers": items(LAYERS, MAX_LAYERS, f"a list of up to {MAX_LAYERS} numbers"),
    "no_rope_layer_interval": LAYERS,
    "num_experts": integer(0, 2**14),
    "num_local_experts": integer(0, 2**14),
    "n_routed_experts": integer(0, 2**14),
    "moe_num_experts": integer(0, 2**14),
    "num_experts_per_tok": integer(1, 2**10),
    "n_shared_experts": integer(0, 2**10),
    "n_group": integer(0, 2**14),
    "topk_group": integer(0, 2**14),
    "topk_method": TEXT,
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": FACTOR,
    "decoder_sparse_step": LAYERS,
    "mlp_only_layers": items(LAYERS, MAX_LAYERS, f"a list of up to {MAX_LAYERS} numbers of layers"),
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": LAYERS,
    "num_nextn_predict_layers": LAYERS,
    "kv_lora_rank": integer(1, 2**16),
    "q_lora_rank": integer(1, 2**16),
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": PAIRS,
    "v_head_dim": HEAD,
    "state_size": HEAD,
    "conv_kernel": integer(2, 64),
    "expand": integer(1, 64),
    "time_step_rank": WIDTH,
    "num_heads": COUNT,
    "n_groups": COUNT,
    "use_conv_bias": FLAG,
    "mamba_d_state": HEAD,
    "mamba_d_conv": integer(2, 64),
    "mamba_expand": integer(1, 64),
    "mamba_dt_rank": WIDTH,
    "mamba_n_heads": COUNT,
    "mamba_d_head": HEAD,
    "mamba_n_groups": COUNT,
    "mamba_conv_bias": FLAG,
    "mamba_proj_bias": FLAG,
    "mamba_d_ssm": WIDTH,
    "mamba_rms_norm": FLAG,
    "mamba_norm_before_gate": FLAG,
    "projectors_bias": FLAG,
    "shared_intermediate_size": integer(0, 2**24),
    "position_embedding_type": TEXT,
    "layers_block_type": items(TEXT, MAX_LAYERS, f"a list of up to {MAX_LAYERS} names"),
    "ssm_multipliers": Rule("a list of 5 numbers", lambda value: _are_numbers(value, 5)),
    "mlp_multipliers": Rule("a list of 2 numbers", lambda value: _are_numbers(value, 2)),
    "ssm_in_multiplier": SCALE,
    "ssm_out_multiplier": SCALE,
    "attention_in_multiplier": SCALE,
    "attention_out_multiplier": SCALE,
    "key_multiplier": SCALE,
    "lm_head_multiplier": SCALE,
    "attn_layer_period": LAYER_NUMBER,
    "attn_layer_offset": LAYERS,
    "attn_layer_indices": items(LAYERS, MAX_LAYERS, f"a list of up to {MAX_LAYERS} numbers of layers"),
    "expert_layer_period": LAYER_NUMBER,
    "expert_layer_offset": LAYERS,
    "full_attention_interval": LAYER_NUMBER,
    "linear_num_key_heads": COUNT,
    "linear_num_value_heads": COUNT,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_conv_kernel_dim": integer(2, 64),
}
ROPE: Final[dict[str, Rule]] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": THETA,
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "original_max_position_embeddings": POSITIONS,
    "attention_factor": FACTOR,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "mscale": SCALE,
    "mscale_all_dim": SCALE,
    "truncate": FLAG,
    "partial_rotary_factor": number(0, 1),
    "short_factor": items(FACTOR, 2**13, "a list of up to 8192 positive numbers"),
    "long_factor": items(FACTOR, 2**13, "a list of up to 8192 positive numbers"),
    "max_position_embeddings": POSITIONS,
}
ROPE_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}
"""What a scaling of rotary frequencies cannot do without."""
_LAYER_KINDS: Final = ("full_attention", "sliding_attention")


class ModelFields(dict[str, Any]):
    """A configuration that was checked. To look something up by [] is to need it: where there is none, or null, it is
    a ModelError. What an architecture can do without is asked for by `get`."""

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the model's config has no {key}, which its architecture needs")
        return value


def changed(config: Mapping[str, Any], **values: Any) -> ModelFields:
    """The configuration of a part of a model: with other values, and errors that name what is missing."""
    return ModelFields({**config, **values})


def check_fields(where: object, config: Mapping[str, Any]) -> ModelFields:
    """The configuration, every known field of which can be used; others are left as they are. `where`: the model or
    file, for messages. Raises ModelError that names the field, its value and what is allowed."""
    _check(where, "", FIELDS, config)
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    if layers and kinds and len(kinds) < layers:
        raise ModelError(f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    if heads and config.get("hidden_size") and not config.get("head_dim") and "kv_lora_rank" not in config:
        size = config["hidden_size"] // heads
        if not size or not PAIRS.allows(size):
            raise ModelError(f"{where}: hidden_size // num_attention_heads={size} is not {PAIRS.words}")
    _check_experts(where, config)
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(where, name, config.get(name))
    return ModelFields(config)


def check_sizes(where: object, config: Mapping[str, Any], names: Collection[str]) -> ModelFields:
    """The configuration of a model that is computed elsewhere: only these fields are looked at. Raises ModelError."""
    _check(where, "", {name: rule for name, rule in FIELDS.items() if name in names}, config)
    return ModelFields(config)


def _check(where: object, prefix: str, rules: Mapping[str, Rule], values: Mapping[str, Any]) -> None:
    for name, rule in rules.items():
        if not rule.allows(values.get(name)):
            raise ModelError(f"{where}: {prefix}{name}={shown(values[name])} is not allowed: {rule.words}")


def _check_experts(where: object, config: Mapping[str, Any]) -> None:
    counts = [config[name] for name in FIELDS if name.endswith("experts") and "shared" not in name and config.get(name)]
    chosen = config.get("num_experts_per_tok")
    groups = config.get("n_group") or 1
    if not counts:
        return
    if chosen and chosen > max(counts):
        raise ModelError(f"{where}: num_experts_per_tok={chosen} is more than the {max(counts)} experts")
    if max(counts) % groups:
        raise ModelError(f"{where}: n_group={groups} does not divide the {max(counts)} experts")
    if (config.get("topk_group") or 1) > groups:
        raise ModelError(f"{where}: topk_group={config['topk_group']} is more than n_group={groups}")


def _check_rope(where: object, name: str, settings: Mapping[str, Any] | None) -> None:
    if not settings:
        return
    for kind in _LAYER_KINDS:
        part = settings.get(kind)
        if part is not None:
            if not isinstance(part, dict):
                raise ModelError(f"{where}: {name}.{kind}={shown(part)} is not allowed: {OBJECT.words}")
            _check_rope(where, f"{name}.{kind}", part)
    _check(where, f"{name}.", ROPE, settings)
    scaling = settings.get("rope_type") or settings.get("type") or "default"
    for needed in ROPE_NEEDS.get(scaling, ()):
        if settings.get(needed) is None:
            raise ModelError(f"{where}: {name} of type {scaling!r} has no {needed}")
    if scaling == "llama3" and settings["low_freq_factor"] > settings["high_freq_factor"]:
        raise ModelError(
            f"{where}: {name}.low_freq_factor={settings['low_freq_factor']} is above "
            f"high_freq_factor={settings['high_freq_factor']}"
        )
