"""GGUF families of decoders with one MLP in each layer."""

from typing import Any, Final

from pagemill.artifacts.gguf_family import (
    AFTER,
    HALVES,
    LAYER,
    GgufFamily,
    optional,
    optional_window,
    window_kinds,
    without,
)
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys

_GEMMA3_LAYERS_PER_FULL: Final = 6
_GEMMA3_LOCAL_ROPE_BASE: Final = 10_000.0
_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62
_GEMMA3_FALLBACK_THETA: Final = 1_000_000.0
_MIXTRAL: Final = {"gate": "w1", "up": "w3", "down": "w2"}


def _llama(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("llama.attention.sliding_window", 0)
    if keys.integer("llama.expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window or None,
            "num_local_experts": keys.integer("llama.expert_count"),
            "num_experts_per_tok": keys.integer("llama.expert_used_count"),
        }
    if window > 0:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _qwen2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _gemma3(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    # The 27B model scales queries by the width per head; every other one by the head's own size.
    scalar = config["head_dim"]
    if num_layers == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.integer("gemma3.attention.sliding_window"),
        "layer_types": window_kinds(keys, "gemma3", num_layers, _GEMMA3_LAYERS_PER_FULL),
        "rope_local_base_freq": keys.number("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_BASE),
        "attn_logit_softcapping": optional(keys, "gemma3.attn_logit_softcapping"),
        "final_logit_softcapping": optional(keys, "gemma3.final_logit_softcapping"),
    }


def _gemma(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    # As of Gemma 3, the 27B model scales queries by the width per head.
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA2_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.integer("gemma2.attention.sliding_window"),
        "attn_logit_softcapping": optional(keys, "gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": optional(keys, "gemma2.final_logit_softcapping"),
    }


def _phi3(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.integer("phi3.attention.sliding_window", 0)
    return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": window or None}


def _olmo2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = optional_window(keys, "olmo2", config["num_hidden_layers"], 4)
    if window["sliding_window"] is None:
        return {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **window}


def granite_factors(keys: GgufKeys, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """What all models of Granite multiply scores, embeddings, sums and logits with."""
    return {
        "attention_multiplier": keys.number(f"{arch}.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": optional(keys, f"{arch}.embedding_scale"),
        "residual_multiplier": optional(keys, f"{arch}.residual_scale"),
        "logits_scaling": optional(keys, f"{arch}.logit_scale"),
    }


def _granite(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **granite_factors(keys, "granite", config),
    }


def _glm4(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}


def _command_r(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "logit_scale": optional(keys, "command-r.logit_scale"),
    }


def _cohere2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "logit_scale": optional(keys, "cohere2.logit_scale"),
        "sliding_window": keys.integer("cohere2.attention.sliding_window"),
        "sliding_window_pattern": 4,
    }


def _smollm3(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4}


def _starcoder2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": config["attention_bias"],
    }


def _gpt2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}


DENSE: Final[dict[str, GgufFamily]] = {
    "gemma3": GgufFamily(
        _gemma3,
        ("Gemma3ForCausalLM",),
        layer=LAYER
        | {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
        rope_theta=_GEMMA3_FALLBACK_THETA,
    ),
    "cohere2": GgufFamily(_cohere2, ("Cohere2ForCausalLM",)),
    "command-r": GgufFamily(_command_r, ("CohereForCausalLM",), layer=without("attn_q_norm", "attn_k_norm")),
    "gemma": GgufFamily(_gemma, ("GemmaForCausalLM",), norm_offset=1.0),
    "gemma2": GgufFamily(
        _gemma2,
        ("Gemma2ForCausalLM",),
        layer=LAYER | {"ffn_norm": "pre_feedforward_layernorm"} | AFTER,
        norm_offset=1.0,
    ),
    "glm4": GgufFamily(
        _glm4,
        ("Glm4ForCausalLM",),
        layer=LAYER
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        turns_part=True,
    ),
    "gpt2": GgufFamily(
        _gpt2,
        ("GPT2LMHeadModel",),
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        top={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        layers="h",
    ),
    "granite": GgufFamily(_granite, ("GraniteForCausalLM",), paired_heads=HALVES),
    "llama": GgufFamily(
        _llama,
        ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        layer=LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        stacks={f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{its}" for name, its in _MIXTRAL.items()},
        numbered={f"ffn_{name}": f"block_sparse_moe.experts.{{}}.{its}" for name, its in _MIXTRAL.items()},
        paired_heads=HALVES,
        mixes=True,
    ),
    "olmo2": GgufFamily(
        _olmo2, ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), layer=without("attn_norm", "ffn_norm") | AFTER
    ),
    "phi3": GgufFamily(
        _phi3,
        ("Phi3ForCausalLM",),
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        turns_part=True,
    ),
    "qwen2": GgufFamily(_qwen2, ("Qwen2ForCausalLM",)),
    "qwen3": GgufFamily(_qwen3, ("Qwen3ForCausalLM",)),
    "smollm3": GgufFamily(_smollm3, ("SmolLM3ForCausalLM",), paired_heads=HALVES),
    "starcoder2": GgufFamily(
        _starcoder2, ("Starcoder2ForCausalLM",), layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
}
"""`general.architecture` -> the family."""
