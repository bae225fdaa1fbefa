"""GGUF families of decoders whose checkpoints have query, key and value in one weight, and others with LayerNorms or
norms in places of their own."""

from dataclasses import replace
from typing import Any, Final

from pagemill.artifacts.gguf_family import AFTER, LAYER, GgufFamily, Made, optional_window, without
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys

_ROWS_OF_QKV: Final = {
    f"self_attn.{name}_proj.{kind}": Made(f"{name}_rows", (f"attn_qkv.{kind}",))
    for name in "qkv"
    for kind in ("weight", "bias")
}
"""Of files whose makers had query, key and value in one weight, where Hugging Face's checkpoints have three."""
_PLAIN: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_TOP: Final = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}


def _bloom(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}


def _falcon(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    new = two_norms or config["num_key_value_heads"] > 1
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": not new,
        "parallel_attn": True,
        "bias": config["attention_bias"],
        "alibi": False,
    }


def _gpt_neox(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "use_parallel_residual": keys.flag("gptneox.use_parallel_residual", True),
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
    }


def _phi2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _stablelm(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _glm(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _exaone4(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        **optional_window(keys, "exaone4", config["num_hidden_layers"], 4),
    }


def _falcon_variant(file: GgufFile) -> GgufFamily | None:
    return _FALCON_TWO_NORMS if "blk.0.attn_norm_2.weight" in file.tensors else None


_GROUPED: Final = {
    f"self_attention.query_key_value.{kind}": Made("grouped_rows", (f"attn_qkv.{kind}",)) for kind in ("weight", "bias")
}
_FALCON: Final = GgufFamily(
    _falcon,
    ("FalconForCausalLM",),
    layer=_PLAIN | {"attn_output": "self_attention.dense"},
    top=_FALCON_TOP,
    made=_GROUPED,
    layers="transformer.h",
    variant=_falcon_variant,
)
_FALCON_TWO_NORMS: Final = replace(
    _FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, variant=None
)

JOINED: Final[dict[str, GgufFamily]] = {
    "bloom": GgufFamily(
        _bloom,
        ("BloomForCausalLM",),
        layer=_PLAIN | {"attn_output": "self_attention.dense"},
        top=_FALCON_TOP | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        made=_GROUPED,
        layers="transformer.h",
    ),
    "chatglm": GgufFamily(
        _glm,
        ("GlmForCausalLM",),
        layer=LAYER | {"ffn_up": "mlp.gate_up_proj"},
        made=_ROWS_OF_QKV,
        turns_part=True,
    ),
    "exaone4": GgufFamily(_exaone4, ("Exaone4ForCausalLM",), layer=without("attn_norm", "ffn_norm") | AFTER),
    "falcon": _FALCON,
    "gptneox": GgufFamily(
        _gpt_neox,
        ("GPTNeoXForCausalLM",),
        layer=_PLAIN | {"attn_output": "attention.dense"},
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        made={
            f"attention.query_key_value.{kind}": Made("grouped_rows", (f"attn_qkv.{kind}",))
            for kind in ("weight", "bias")
        },
        turns_part=True,
        layers="gpt_neox.layers",
    ),
    "phi2": GgufFamily(
        _phi2,
        ("PhiForCausalLM",),
        layer=LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        made=_ROWS_OF_QKV,
        turns_part=True,
    ),
    "stablelm": GgufFamily(
        _stablelm,
        ("StableLmForCausalLM",),
        layer=without("attn_q_norm", "attn_k_norm"),
        stacks={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        turns_part=True,
    ),
}
"""`general.architecture` -> the family."""
