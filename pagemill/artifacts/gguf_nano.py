"""GGUF families of Gemma 3n and Gemma 4, which have a vector of each token for each layer."""

import math
from typing import Any, Final

import numpy as np

from pagemill.artifacts.gguf_family import LAYER, TOP, GgufFamily, optional, window_kinds
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_SOFT_CAP: Final = 30.0
_LOCAL_ROPE_BASE: Final = 10_000.0
_NOT_TURNED: Final = 1e29
"""What at least divides the frequencies of elements that are not turned."""

_AROUND: Final = LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_VECTORS: Final = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _vector_sizes(file: GgufFile, keys: GgufKeys, arch: str) -> dict[str, Any]:
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": keys.integer(f"{arch}.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table is not None else None,
        "num_kv_shared_layers": keys.integer(f"{arch}.attention.shared_kv_layers", 0),
    }


def _gemma3n(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    low = file.tensors.get("blk.0.laurel_l.weight")
    if low is None:
        raise ModelError(f"{file.path} has no tensor blk.0.laurel_l.weight")
    return {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": keys.per_layer("gemma3n.feed_forward_length", count),
        "sliding_window": keys.integer("gemma3n.attention.sliding_window"),
        "layer_types": window_kinds(keys, "gemma3n", count, 5),
        "rope_local_base_freq": keys.number("gemma3n.rope.freq_base_swa", _LOCAL_ROPE_BASE),
        "final_logit_softcapping": keys.number("gemma3n.final_logit_softcapping", _SOFT_CAP) or None,
        "altup_num_inputs": keys.integer("gemma3n.altup.num_inputs"),
        "altup_active_idx": keys.integer("gemma3n.altup.active_idx", 0),
        "activation_sparsity_pattern": _sparsity(file, keys, count),
        "laurel_rank": low.shape[0],
        **_vector_sizes(file, keys, "gemma3n"),
    }


def _sparsity(file: GgufFile, keys: GgufKeys, count: int) -> list[float]:
    """The share of gates that becomes 0, of each layer: files have the quantile of a normal distribution."""
    key = "gemma3n.activation_sparsity_scale"
    if key not in keys:
        return [0.0] * count
    scales = keys.numbers(key)
    if scales.dtype.kind != "f" or scales.size < count or np.isnan(scales).any():
        raise ModelError(f"{file.path}: {key} does not hold a number for each of {count} layers")
    return [0.5 * (1 + math.erf(float(scale) / math.sqrt(2))) for scale in scales[:count]]


def _gemma4(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    kinds = window_kinds(keys, "gemma4", count, 6)
    sizes = keys.per_layer("gemma4.feed_forward_length", count)
    own = count - keys.integer("gemma4.attention.shared_kv_layers", 0)
    num_experts = keys.integer("gemma4.expert_count", 0)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0] and own < count,
        "sliding_window": keys.integer("gemma4.attention.sliding_window"),
        "layer_types": kinds,
        "final_logit_softcapping": optional(keys, "gemma4.final_logit_softcapping"),
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts,
        "top_k_experts": keys.integer("gemma4.expert_used_count", 0) or None,
        "moe_intermediate_size": keys.integer("gemma4.expert_feed_forward_length", 0) or None,
        **_gemma4_heads(file, keys, config, kinds, own),
        **_vector_sizes(file, keys, "gemma4"),
    }


def _gemma4_heads(file: GgufFile, keys: GgufKeys, config: dict[str, Any], kinds: list[str], own: int) -> dict[str, Any]:
    """Sizes and rotary settings of both kinds of attention. `own`: so many layers have keys and values of their own."""
    wide = config["head_dim"]
    narrow = keys.integer("gemma4.attention.key_length_swa", wide)
    turned = keys.integer("gemma4.rope.dimension_count_swa", narrow)
    if turned != narrow or keys.integer("gemma4.rope.dimension_count", wide) != wide:
        raise ModelError(f"{file.path}: gemma4.rope.dimension_count_swa={turned} of {narrow} is not supported")
    counts = keys.per_layer("gemma4.attention.head_count_kv", len(kinds), config["num_attention_heads"])
    of_kind = {kind: {count for count, one in zip(counts, kinds, strict=True) if one == kind} for kind in set(kinds)}
    if any(len(found) > 1 for found in of_kind.values()):
        raise ModelError(f"{file.path}: gemma4.attention.head_count_kv differs between layers of one kind")
    num_full = next(iter(of_kind.get(FULL, {counts[0]})))
    full = [index for index, kind in enumerate(kinds[:own]) if kind == FULL]
    return {
        "head_dim": narrow,
        "num_key_value_heads": next(iter(of_kind.get(SLIDING, {num_full}))),
        "per_layer_config": {
            str(index): {"head_dim": wide, "num_key_value_heads": num_full}
            for index, kind in enumerate(kinds)
            if kind == FULL
        },
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in full),
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number("gemma4.rope.freq_base_swa", _LOCAL_ROPE_BASE),
            },
            FULL: {
                "rope_type": "proportional",
                "rope_theta": keys.number("gemma4.rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _turned_share(file, wide),
            },
        },
    }


def _turned_share(file: GgufFile, head_size: int) -> float:
    """Of the elements of a wide head: a table divides the frequencies of the others by so much that nothing is left."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return 1.0
    divisors = file.floats(tensor)
    num_turned = int((divisors < _NOT_TURNED).sum())
    if tensor.shape != (head_size // 2,) or not num_turned or (divisors[:num_turned] != 1).any():
        raise ModelError(f"{file.path}: the values in rope_freqs.weight are not Gemma 4's and are not supported")
    return num_turned / len(divisors)


NANO: Final[dict[str, GgufFamily]] = {
    "gemma3n": GgufFamily(
        _gemma3n,
        ("Gemma3nForCausalLM",),
        layer=_AROUND
        | {
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        top=_VECTORS,
        exact={"altup_correct_scale.weight": "altup.correct_output_scale"},
        stacks={
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        varies=("feed_forward_length",),
        rope_theta=1_000_000.0,
    ),
    "gemma4": GgufFamily(
        _gemma4,
        ("Gemma4ForCausalLM",),
        layer=_AROUND
        | {
            "ffn_gate_inp": "router.proj",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top=_VECTORS,
        exact={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
        turns=False,
        mixes=True,
        varies=("feed_forward_length", "attention.head_count_kv"),
    ),
}
"""`general.architecture` -> the family."""
