"""GGUF families of models whose layers have states, alone or mixed with attention."""

from dataclasses import replace
from typing import Any, Final

from pagemill.artifacts.gguf_dense import granite_factors
from pagemill.artifacts.gguf_experts import (
    GRANITE_LAYER,
    GRANITE_MADE,
    QWEN_LAYER,
    QWEN_STACKS,
    SHARED_GATE,
    expert_counts,
    shared_size,
)
from pagemill.artifacts.gguf_family import HALVES, LAYER, TOP, GgufFamily, Made
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError

_MIXER: Final = {"ssm_in": "in_proj", "ssm_x": "x_proj", "ssm_out": "out_proj"}
_FINAL: Final = TOP | {"output_norm": "model.final_layernorm"}
_FEED_FORWARD: Final = {
    **{name: place.replace("mlp.", "feed_forward.") for name, place in LAYER.items()},
    "ffn_norm": "pre_ff_layernorm",
}


def _mixer(name: str) -> dict[str, str]:
    """The linear layers of a mixer that a checkpoint calls so."""
    return {stem: f"{name}.{place}" for stem, place in _MIXER.items()}


def _first(name: str) -> dict[str, Made]:
    """What Mamba has besides."""
    return {
        f"{name}.A_log": Made("decay", ("ssm_a",)),
        f"{name}.conv1d.weight": Made("channels", ("ssm_conv1d.weight",)),
    }


def _second(name: str) -> dict[str, Made]:
    """What Mamba-2 has besides: numbers of heads, in columns."""
    return {
        f"{name}.A_log": Made("flat_decay", ("ssm_a",)),
        f"{name}.D": Made("flat", ("ssm_d",)),
        f"{name}.norm.weight": Made("flat", ("ssm_norm.weight",)),
        f"{name}.conv1d.weight": Made("channels", ("ssm_conv1d.weight",)),
    }


def _second_exact(name: str) -> dict[str, str]:
    return {"ssm_dt.bias": f"{name}.dt_bias", "ssm_conv1d.bias": f"{name}.conv1d.bias"}


def _first_exact(name: str) -> dict[str, str]:
    return {
        "ssm_d": f"{name}.D",
        "ssm_conv1d.bias": f"{name}.conv1d.bias",
        "ssm_dt.weight": f"{name}.dt_proj.weight",
        "ssm_dt.bias": f"{name}.dt_proj.bias",
    }


def _has(file: GgufFile, part: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file.tensors)


def _mamba(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.flag("mamba.ssm.dt_b_c_rms", False):
        raise ModelError(f"{file.path}: Falcon Mamba is not supported (mamba.ssm.dt_b_c_rms)")
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "time_step_rank": keys.integer("mamba.ssm.time_step_rank"),
        **_alone(file, keys, "mamba", config),
    }


def _mamba2(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    sizes = _mamba2_sizes(file, keys, "mamba2")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": sizes["mamba_n_heads"],
        "head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        **_alone(file, keys, "mamba2", config),
    }


def _alone(file: GgufFile, keys: GgufKeys, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """What both have where there is no attention."""
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "intermediate_size": keys.integer(f"{arch}.ssm.inner_size"),
        "state_size": keys.integer(f"{arch}.ssm.state_size"),
        "conv_kernel": keys.integer(f"{arch}.ssm.conv_kernel"),
        "use_bias": _has(file, "ssm_in.bias"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _mamba2_sizes(file: GgufFile, keys: GgufKeys, arch: str) -> dict[str, Any]:
    """By the names that they have where Mamba-2 is mixed with attention."""
    inner = keys.integer(f"{arch}.ssm.inner_size")
    heads = keys.integer(f"{arch}.ssm.time_step_rank")
    if heads < 1 or inner % heads:
        raise ModelError(f"{file.path}: {arch}.ssm.inner_size={inner} is no multiple of time_step_rank={heads}")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": keys.integer(f"{arch}.ssm.state_size"),
        "mamba_n_groups": keys.integer(f"{arch}.ssm.group_count", 1),
        "mamba_d_conv": keys.integer(f"{arch}.ssm.conv_kernel"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _attending(keys: GgufKeys, arch: str, count: int) -> list[int]:
    """The layers that attend: those that have key heads."""
    heads = keys.per_layer(f"{arch}.attention.head_count_kv", count)
    return [index for index, number in enumerate(heads) if number]


def _period(file: GgufFile, layers: list[int], count: int, what: str) -> tuple[int, int]:
    """(period, first) of layers that recur. Raises ModelError where they do not."""
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else max(count, 1)
    if layers != list(range(first, count, period)) or first >= period:
        raise ModelError(f"{file.path}: {what} in layers {layers} do not recur in a fixed period, as Jamba's do")
    return period, first


def _jamba(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    period, first = _period(file, _attending(keys, "jamba", count), count, "attention layers")
    mixed = [index for index in range(count) if f"blk.{index}.ffn_gate_inp.weight" in file.tensors]
    expert_period, first_expert = _period(file, mixed, count, "experts") if mixed else (count, 0)
    inner = keys.integer("jamba.ssm.inner_size")
    if inner % config["hidden_size"]:
        raise ModelError(f"{file.path}: jamba.ssm.inner_size={inner} is no multiple of {config['hidden_size']}")
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": period,
        "attn_layer_offset": first,
        "expert_layer_period": expert_period,
        "expert_layer_offset": first_expert,
        "num_experts": keys.integer("jamba.expert_count", 0) if mixed else 1,
        "num_experts_per_tok": keys.integer("jamba.expert_used_count", 0) if mixed else 1,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_d_state": keys.integer("jamba.ssm.state_size"),
        "mamba_d_conv": keys.integer("jamba.ssm.conv_kernel"),
        "mamba_dt_rank": keys.integer("jamba.ssm.time_step_rank"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _granite_hybrid(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    arch = "granitehybrid"
    attending = _attending(keys, arch, config["num_hidden_layers"])
    shared = "ffn_up_shexp" if _has(file, "ffn_gate_inp.weight") else "ffn_up"
    up = file.tensors.get(f"blk.0.{shared}.weight")
    if up is None:
        raise ModelError(f"{file.path} has no tensor blk.0.{shared}.weight")
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if i in attending else "mamba" for i in range(config["num_hidden_layers"])],
        "position_embedding_type": "nope",
        "shared_intermediate_size": up.shape[0],
        "num_local_experts": keys.integer(f"{arch}.expert_count", 0),
        "num_experts_per_tok": keys.integer(f"{arch}.expert_used_count", 0) or None,
        **granite_factors(keys, arch, config),
        **_mamba2_sizes(file, keys, arch),
    }


def _bamba(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": _attending(keys, "granitehybrid", config["num_hidden_layers"]),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        **_mamba2_sizes(file, keys, "granitehybrid"),
    }


def _falcon_h1(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Weights have their factors in them already."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": keys.integer("falcon-h1.ssm.inner_size"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has(file, "ssm_out.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        **_mamba2_sizes(file, keys, "falcon-h1"),
    }


def _qwen3_next(file: GgufFile, keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    arch = "qwen3next"
    values = keys.integer(f"{arch}.ssm.time_step_rank")
    inner = keys.integer(f"{arch}.ssm.inner_size")
    if values < 1 or inner % values:
        raise ModelError(f"{file.path}: {arch}.ssm.inner_size={inner} is no multiple of time_step_rank={values}")
    count = config["num_hidden_layers"]
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "layer_types": [
            "linear_attention" if f"blk.{index}.ssm_out.weight" in file.tensors else "full_attention"
            for index in range(count)
        ],
        "mlp_only_layers": [i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors],
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "linear_num_key_heads": keys.integer(f"{arch}.ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer(f"{arch}.ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.integer(f"{arch}.ssm.conv_kernel"),
        "shared_expert_intermediate_size": shared_size(file, keys, arch),
        **expert_counts(keys, arch),
    }


def _hybrid_variant(file: GgufFile) -> GgufFamily | None:
    if GgufKeys(file).flag("granitehybrid.rope.scaling.finetuned", False):
        return _BAMBA
    return _GRANITE_EXPERTS if _has(file, "ffn_gate_inp.weight") else None


_BACKBONE: Final = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_SHARED_MLP: Final = "shared_mlp.input_linear.weight"
_GRANITE: Final = GgufFamily(
    _granite_hybrid,
    ("GraniteMoeHybridForCausalLM",),
    layer={
        **GRANITE_LAYER,
        **_mixer("mamba"),
        "ffn_down": "shared_mlp.output_linear",
    },
    exact=_second_exact("mamba"),
    made=_second("mamba") | {_SHARED_MLP: Made("joined_rows", ("ffn_gate.weight", "ffn_up.weight"))},
    paired_heads=HALVES,
    turns=False,
    mixes=True,
    varies=("attention.head_count_kv",),
    variant=_hybrid_variant,
)
_GRANITE_EXPERTS: Final = replace(
    _GRANITE,
    made={**_GRANITE.made, **GRANITE_MADE},
    variant=None,
)
_BAMBA: Final = GgufFamily(
    _bamba,
    ("BambaForCausalLM",),
    layer=_FEED_FORWARD | _mixer("mamba"),
    top=_FINAL,
    exact=_second_exact("mamba"),
    made=_second("mamba"),
    paired_heads=HALVES,
    turns_part=True,
    varies=("attention.head_count_kv",),
)
_MAMBA: Final = GgufFamily(
    _mamba,
    ("MambaForCausalLM",),
    layer=_mixer("mixer") | {"attn_norm": "norm"},
    top=_BACKBONE,
    exact=_first_exact("mixer"),
    made=_first("mixer"),
    turns=False,
    layers="backbone.layers",
)

STATES: Final[dict[str, GgufFamily]] = {
    "falcon-h1": GgufFamily(
        _falcon_h1,
        ("FalconH1ForCausalLM",),
        layer=_FEED_FORWARD | _mixer("mamba"),
        top=_FINAL,
        # Files have this one without an ending.
        exact=_second_exact("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        made=_second("mamba"),
    ),
    "granitehybrid": _GRANITE,
    "jamba": GgufFamily(
        _jamba,
        ("JambaForCausalLM",),
        layer=_FEED_FORWARD
        | _mixer("mamba")
        | {
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
            "ffn_gate_inp": "feed_forward.router",
        },
        top=_FINAL,
        exact=_first_exact("mamba"),
        stacks={f"ffn_{name}_exps": f"feed_forward.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
        made=_first("mamba"),
        turns=False,
        mixes=True,
        varies=("attention.head_count_kv",),
    ),
    "mamba": _MAMBA,
    "mamba2": replace(
        _MAMBA,
        config=_mamba2,
        architectures=("Mamba2ForCausalLM",),
        exact=_second_exact("mixer"),
        made=_second("mixer"),
    ),
    "qwen3next": GgufFamily(
        _qwen3_next,
        ("Qwen3NextForCausalLM",),
        layer=QWEN_LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        },
        exact={"ssm_dt.bias": "linear_attn.dt_bias"},
        stacks=QWEN_STACKS,
        made={
            **SHARED_GATE,
            "linear_attn.A_log": Made("decay", ("ssm_a",)),
            "linear_attn.conv1d.weight": Made("channels", ("ssm_conv1d.weight",)),
            "linear_attn.in_proj_qkvz.weight": Made("delta_rows", ("attn_qkv.weight", "attn_gate.weight")),
        },
        norm_offset=1.0,
        plain_norms=("linear_attn.norm.weight",),
        turns_part=True,
        mixes=True,
    ),
}
"""`general.architecture` -> the family."""
