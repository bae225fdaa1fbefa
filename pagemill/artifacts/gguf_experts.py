"""GGUF families of decoders with experts."""

from typing import Any, Final

from pagemill.artifacts.gguf_dense import granite_factors
from pagemill.artifacts.gguf_family import HALVES, LAYER, GgufFamily, Made, without
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys

_SIGMOID: Final = 2
"""`expert_gating_func` of routers that are no softmax."""
_SCOUT_EXPERTS: Final = 16
_CHUNK: Final = 8192
_EXPERTS: Final = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_SHARED: Final = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED_GATE: Final = {"mlp.shared_expert_gate.weight": Made("one_row", ("ffn_gate_inp_shexp.weight",))}
QWEN_STACKS: Final = _EXPERTS
QWEN_LAYER: Final = LAYER | _SHARED | {"ffn_gate_inp": "mlp.gate"}


def expert_counts(keys: GgufKeys, arch: str) -> dict[str, Any]:
    """How many experts there are, how many a token has, and how large they are."""
    return {
        "num_experts": keys.integer(f"{arch}.expert_count"),
        "num_experts_per_tok": keys.integer(f"{arch}.expert_used_count"),
        "moe_intermediate_size": keys.integer(f"{arch}.expert_feed_forward_length"),
    }


def shared_size(file: GgufFile, keys: GgufKeys, arch: str) -> int:
    """Of the expert that all tokens share, inside."""
    found = next((tensor for name, tensor in file.tensors.items() if name.endswith("ffn_up_shexp.weight")), None)
    return keys.integer(f"{arch}.expert_shared_feed_forward_length", 0) or (found.shape[0] if found else 0)


def without_router(file: GgufFile, count: int) -> list[int]:
    """The layers that have no experts."""
    return [index for index in range(count) if f"blk.{index}.ffn_gate_inp.weight" not in file.tensors]


def _qwen2_moe(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
        "mlp_only_layers": without_router(file, config["num_hidden_layers"]),
        "shared_expert_intermediate_size": shared_size(file, keys, "qwen2moe"),
        **expert_counts(keys, "qwen2moe"),
    }


def _qwen3_moe(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "mlp_only_layers": without_router(file, config["num_hidden_layers"]),
        **expert_counts(keys, "qwen3moe"),
    }


def _olmoe(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": keys.integer("olmoe.expert_count"),
        "num_experts_per_tok": keys.integer("olmoe.expert_used_count"),
    }


def _routed(keys: GgufKeys, arch: str) -> dict[str, Any]:
    """What DeepSeek's routers have. A file of a model without experts says 0, or nothing."""
    return {
        "n_routed_experts": keys.integer(f"{arch}.expert_count", 0) or None,
        "num_experts_per_tok": keys.integer(f"{arch}.expert_used_count", 0) or None,
        "moe_intermediate_size": keys.integer(f"{arch}.expert_feed_forward_length", 0) or None,
        "n_shared_experts": keys.integer(f"{arch}.expert_shared_count", 0),
        "first_k_dense_replace": keys.integer(f"{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number(f"{arch}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.flag(f"{arch}.expert_weights_norm", False),
        "n_group": keys.integer(f"{arch}.expert_group_count", 1),
        "topk_group": keys.integer(f"{arch}.expert_group_used_count", 1),
    }


def _deepseek2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    third = keys.integer("deepseek2.expert_gating_func", 1) == _SIGMOID
    turned = config["head_dim"]
    # Files from before 2025 say sizes of heads as they are in a checkpoint.
    key_size = keys.integer("deepseek2.attention.key_length_mla", keys.integer("deepseek2.attention.key_length"))
    value_size = keys.integer("deepseek2.attention.value_length_mla", keys.integer("deepseek2.attention.value_length"))
    routed = _routed(keys, "deepseek2")
    return {
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.integer("deepseek2.attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.integer("deepseek2.attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key_size - turned,
        "v_head_dim": value_size,
        "topk_method": "group_limited_greedy" if routed["n_group"] > 1 else "greedy",
        "rope_scaling": _with_magnitude(keys, config["rope_scaling"]),
        **routed,
    }


def _with_magnitude(keys: GgufKeys, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """YaRN's settings with what multiplies scores, of which files have a tenth."""
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    if scaling is None or key not in keys:
        return scaling
    weight = 10 * keys.number(key)
    return scaling | {"mscale": weight, "mscale_all_dim": weight}


def _glm4_moe(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        **_routed(keys, "glm4moe"),
    }


def _gpt_oss(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": keys.integer("gpt-oss.expert_feed_forward_length"),
        "num_local_experts": keys.integer("gpt-oss.expert_count"),
        "num_experts_per_tok": keys.integer("gpt-oss.expert_used_count"),
        "sliding_window": keys.integer("gpt-oss.attention.sliding_window"),
        "rope_scaling": None if scaling is None else scaling | {"truncate": False},
    }


def _llama4(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    num_experts = keys.integer("llama4.expert_count", 0)
    bare = without_router(file, count)
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size": keys.integer("llama4.expert_feed_forward_length", 0) or config["intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": num_experts,
        "num_experts_per_tok": keys.integer("llama4.expert_used_count", 1) or 1,
        "moe_layers": [index for index in range(count) if index not in bare],
        # Files say none of these; the two models that there are differ in their norms.
        "attention_chunk_size": _CHUNK,
        "no_rope_layer_interval": 4,
        "use_qk_norm": num_experts == _SCOUT_EXPERTS,
    }


def _granite_moe(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "shared_intermediate_size": shared_size(file, keys, "granitemoe"),
        "num_local_experts": keys.integer("granitemoe.expert_count"),
        "num_experts_per_tok": keys.integer("granitemoe.expert_used_count"),
        **granite_factors(keys, "granitemoe", config),
    }


GRANITE_LAYER: Final = without("ffn_gate", "ffn_up", "ffn_down") | {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
GRANITE_MADE: Final = {
    "shared_mlp.input_linear.weight": Made("joined_rows", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    "block_sparse_moe.input_linear.weight": Made("stacked_experts", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
}
EXPERTS: Final[dict[str, GgufFamily]] = {
    "deepseek2": GgufFamily(
        _deepseek2,
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        layer=LAYER
        | {name: place.replace("expert", "experts") for name, place in _SHARED.items()}
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "ffn_gate_inp": "mlp.gate",
        },
        exact={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        stacks=_EXPERTS,
        made={"self_attn.kv_b_proj.weight": Made("latent_heads", ("attn_k_b.weight", "attn_v_b.weight"))},
        latent=True,
        mixes=True,
    ),
    "glm4moe": GgufFamily(
        _glm4_moe,
        ("Glm4MoeForCausalLM",),
        layer=LAYER
        | {name: place.replace("expert", "experts") for name, place in _SHARED.items()}
        | {"ffn_gate_inp": "mlp.gate", "post_attention_norm": "post_attention_layernorm"},
        exact={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        stacks=_EXPERTS,
        turns_part=True,
        mixes=True,
    ),
    "gpt-oss": GgufFamily(
        _gpt_oss,
        ("GptOssForCausalLM",),
        layer=without("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        exact={
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        made={
            "mlp.experts.gate_up_proj": Made("paired_experts", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
            "mlp.experts.gate_up_proj_bias": Made("paired_biases", ("ffn_gate_exps.bias", "ffn_up_exps.bias")),
            "mlp.experts.down_proj": Made("turned_experts", ("ffn_down_exps.weight",)),
        },
        mixes=True,
    ),
    "granitemoe": GgufFamily(
        _granite_moe,
        ("GraniteMoeForCausalLM",),
        layer=GRANITE_LAYER,
        made=GRANITE_MADE,
        paired_heads=HALVES,
        mixes=True,
    ),
    "llama4": GgufFamily(
        _llama4,
        ("Llama4ForCausalLM",),
        layer={
            name: place.replace("mlp.", "feed_forward.")
            for name, place in (LAYER | _SHARED | {"ffn_gate_inp": "mlp.router"}).items()
        },
        made={
            "feed_forward.experts.gate_up_proj": Made("joined_experts", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
            "feed_forward.experts.down_proj": Made("turned_experts", ("ffn_down_exps.weight",)),
        },
        mixes=True,
    ),
    "olmoe": GgufFamily(
        _olmoe,
        ("OlmoeForCausalLM",),
        layer=LAYER | {"ffn_gate_inp": "mlp.gate"},
        stacks=_EXPERTS,
        mixes=True,
    ),
    "qwen2moe": GgufFamily(
        _qwen2_moe,
        ("Qwen2MoeForCausalLM",),
        layer=QWEN_LAYER,
        stacks=_EXPERTS,
        made=SHARED_GATE,
        mixes=True,
    ),
    "qwen3moe": GgufFamily(_qwen3_moe, ("Qwen3MoeForCausalLM",), layer=QWEN_LAYER, stacks=_EXPERTS, mixes=True),
}
"""`general.architecture` -> the family."""
