"""Checkpoints as GGUF files: names by llama.cpp's own table, values and keys as its converter writes them."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from pagemill.artifacts.json_file import read_json_object

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
PAIRED = ("granite", "smollm3", "llama", "granitehybrid", "granitemoe")
SLIDING = "sliding_attention"


def convert(folder: Path, path: Path, family: str, kind: str = "F32", *, stacks: bool = True) -> Path:
    """What llama.cpp's converter makes of a checkpoint. `kind`: of matrices whose rows are whole blocks of it. Without
    `stacks`, each matrix of Mixtral's experts is a tensor, as in files from before April 2024."""
    config = _config(folder)
    writer = gguf.GGUFWriter(path, family)
    _add_keys(writer, config, family)
    architecture = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    layers = config["num_hidden_layers"] + 1
    names = gguf.get_tensor_name_map(architecture, layers)
    tensors = load_file(folder / "model.safetensors")
    if family in EXTRA_KEYS:
        EXTRA_KEYS[family](writer, config, tensors)
    if family in RENAMED:
        tensors = dict(RENAMED[family](config, tensors))
    for name, values in (_stacked(tensors) if stacks else _numbered(tensors)).items():
        stored = values
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if family in PAIRED:
            for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{part}." in name:
                    stored = values.reshape(config[count], 2, -1, *values.shape[1:]).swapaxes(1, 2)
                    stored = stored.reshape(values.shape)
        known = name if name.startswith(("blk.", "token_embd")) else names.get_name(name, (".weight", ".bias"))
        assert known is not None, name
        _add(writer, known, np.ascontiguousarray(stored), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[quant][0]
    is_float = values.ndim < 2 or values.shape[-1] % block or ".ssm_" in name or "ffn_gate_inp" in name
    if kind == "F32" or is_float:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)


def _config(folder: Path) -> Config:
    config = read_json_object(folder / "config.json")
    for usual, others in {
        "num_attention_heads": ("n_head",), "num_hidden_layers": ("n_layer",),
        "hidden_size": ("n_embd", "n_embed"), "intermediate_size": ("n_inner",),
        "num_key_value_heads": ("num_kv_heads",),
    }.items():  # fmt: skip
        for other in others:
            config[usual] = config.get(usual) or config.get(other)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = 1
    for sizes in (config.get("per_layer_config") or {}).values():  # Gemma 4's, of layers without a window
        config["global_head_dim"] = sizes["head_dim"]
        config["num_global_key_value_heads"] = sizes.get("num_key_value_heads")
    return config


def _stacked(tensors: Tensors) -> Tensors:
    """Experts' matrices one above the other."""
    found: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match:
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        else:
            rest[name] = values
    return rest | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in found.items()}


def _numbered(tensors: Tensors) -> Tensors:
    return {
        re.sub(
            r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d)",
            lambda match: f"blk.{match[1]}.ffn_{ {'w1': 'gate', 'w2': 'down', 'w3': 'up'}[match[3]] }.{match[2]}",
            name,
        ): values
        for name, values in tensors.items()
    }


def _add_keys(writer: gguf.GGUFWriter, config: Config, family: str) -> None:
    """Those that most families have."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    heads = config.get("num_attention_heads") or 0
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    writer.add_context_length(config.get("max_position_embeddings") or 512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * config["hidden_size"])
    writer.add_head_count(heads)
    if family not in ("jamba", "granitehybrid", "gemma4", "deepseek2", "mamba", "mamba2"):
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        eps = config.get("layer_norm_eps") or config.get("norm_epsilon") or config["layer_norm_epsilon"]
        (writer.add_layer_norm_rms_eps if family.startswith("mamba") else writer.add_layer_norm_eps)(eps)
    if rope and family not in ("gemma4", "deepseek2"):
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if config.get("head_dim") and family not in ("gemma4", "deepseek2"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _add_expert_keys(writer, config)


def _add_expert_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(name):
            writer.add_expert_count(config[name])
            writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _windows(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == SLIDING for kind in config["layer_types"]])


def _gemma2(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _granite(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _granite_moe(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _granite(writer, config, tensors)
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _bert(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _logit_scale(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_logit_scale(config["logit_scale"])


def _parallel(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_parallel_residual(config.get("use_parallel_residual", True))


def _vectors(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _windows(writer, config, tensors)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_shared_kv_layers(config.get("num_kv_shared_layers") or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_parameters"][SLIDING]["rope_theta"])


def _gemma3n(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _vectors(writer, config, tensors)
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -math.inf for share in shares])


def _gemma4(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _vectors(writer, config, tensors)
    slides = [kind == SLIDING for kind in config["layer_types"]]
    wide, narrow = config["global_head_dim"], config["head_dim"]
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    of_full = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    writer.add_head_count_kv([config["num_key_value_heads"] if one else of_full for one in slides])
    if config.get("use_double_wide_mlp"):
        own = len(slides) - config["num_kv_shared_layers"]
        sizes = [config["intermediate_size"] * (1 if index < own else 2) for index in range(len(slides))]
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        writer.add_feed_forward_length(sizes)
    part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turned = int(wide * part / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (wide // 2 - turned), np.float32))


def _shared(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _routed(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _deepseek2(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _routed(writer, config, tensors)
    writer.add_head_count_kv(1)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + turned)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _gpt_oss(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _llama4(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.kv_data[0].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _mamba(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])


def _mamba2(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _mixed(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    """Mamba-2 by the names that it has beside attention."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _granite_hybrid(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _mixed(writer, config, tensors)
    attends = [f"model.layers.{i}.self_attn.q_proj.weight" in tensors for i in range(config["num_hidden_layers"])]
    writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
    is_bamba = config["model_type"] == "bamba"
    writer.add_rope_scaling_finetuned(is_bamba)
    if not is_bamba:
        _granite(writer, config, tensors)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _jamba(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    period, first = config["attn_layer_period"], config["attn_layer_offset"]
    attends = [index % period == first for index in range(config["num_hidden_layers"])]
    writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])


def _qwen3_next(writer: gguf.GGUFWriter, config: Config, tensors: Tensors) -> None:
    _shared(writer, config, tensors)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])


EXTRA_KEYS: dict[str, Callable[[gguf.GGUFWriter, Config, Tensors], None]] = {
    "bert": _bert, "command-r": _logit_scale, "cohere2": _logit_scale, "deepseek2": _deepseek2, "exaone4": _windows,
    "falcon-h1": _mixed, "gemma2": _gemma2, "gemma3n": _gemma3n, "gemma4": _gemma4, "glm4moe": _routed,
    "gpt-oss": _gpt_oss, "gptneox": _parallel, "granite": _granite, "granitehybrid": _granite_hybrid,
    "granitemoe": _granite_moe, "jamba": _jamba,
    "llama4": _llama4, "mamba": _mamba, "mamba2": _mamba2, "olmo2": _windows, "qwen2moe": _shared,
    "qwen3next": _qwen3_next, "stablelm": _parallel,
}  # fmt: skip
"""Keys of a family besides those of most."""


def _plus_one(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        plain = name.endswith("linear_attn.norm.weight") or not name.endswith("norm.weight")
        yield name, values if plain else values + 1


def _transposed(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        yield name, values.T if values.ndim == 2 and ".h." in name else values


def _ungrouped(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    for name, values in tensors.items():
        if "query_key_value" in name:
            grouped = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
            parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        yield name.removeprefix("transformer.") if config["model_type"] == "bloom" else name, values


def _bare_encoder(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    for name, values in tensors.items():
        if not name.startswith("pooler.") and not name.endswith("position_ids"):
            yield name, values[first:] if "position_embeddings" in name else values


def _norms_of_heads(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if match:
            found.setdefault(f"{match[1]}.weight", {})[int(match[2])] = values
        else:
            yield name, values
    for name, parts in found.items():
        yield name, np.stack([parts[i] for i in sorted(parts)])


def _layer(name: str) -> str:
    """The number of the layer that a checkpoint's tensor is of."""
    return name.removeprefix("model.layers.").partition(".")[0]


def _streams(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):
        values = tensors[name]
        match = re.fullmatch(r"model\.(altup_\w*projections)\.\d+\.weight", name)
        if match:
            stacks.setdefault(f"model.{match[1]}.weight", []).append(values)
            continue
        if name.endswith("embed_tokens_per_layer.weight"):
            values = np.pad(values, ((0, config["vocab_size"] - len(values)), (0, 0)))
        yield name + ".weight" * name.endswith("_scale"), values
    for name, parts in stacks.items():
        yield name, np.stack(parts)


def _gemma4_names(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        layer = _layer(name)
        if name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", values
        elif name.endswith("per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", values
        else:
            yield (
                name + ".weight" * (name.endswith("layer_scalar") or name.endswith(("gate_up_proj", "s.down_proj"))),
                values,
            )


def _latent(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            split = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            key = config["qk_nope_head_dim"]
            yield name.replace("kv_b_proj", "k_b_proj"), split[:, :key].swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), split[:, key:]
        else:
            yield name, values


def _open_pairs(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        if name.endswith("down_proj"):
            yield f"{name}.weight", values.swapaxes(-1, -2)
        elif name.endswith("gate_up_proj"):
            turned = values.swapaxes(-1, -2)
            yield name.replace("gate_up_proj", "gate_proj.weight"), turned[:, ::2]
            yield name.replace("gate_up_proj", "up_proj.weight"), turned[:, 1::2]
        elif name.endswith("gate_up_proj_bias"):
            yield name.replace("gate_up_proj_bias", "gate_proj.bias"), values[:, ::2]
            yield name.replace("gate_up_proj_bias", "up_proj.bias"), values[:, 1::2]
        elif name.endswith("down_proj_bias"):
            yield name.replace("down_proj_bias", "down_proj.bias"), values
        else:
            yield name + ".weight" * name.endswith("sinks"), values


def _open_halves(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors.items():
        if name.endswith("experts.down_proj"):
            yield f"{name}.weight", values.swapaxes(-1, -2)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values.swapaxes(-1, -2), 2, axis=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield name, values


def _states(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    second = "mamba_n_heads" in config or config["model_type"] == "mamba2"
    for name, values in tensors.items():
        if name.endswith("A_log"):
            values = -np.exp(values)
        if second and name.endswith((".A_log", ".D")):
            values = values[:, None]
        if "conv1d.weight" in name:
            values = values.squeeze()
        if second and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            values = values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
        yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _falcon_h1(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [inner, inner, shared, shared, config["mamba_n_heads"]]
    of_rows = np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)[:, None]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * into, "q_proj": into,
        "v_proj": into, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "in_proj": of_rows * np.float32(config["ssm_in_multiplier"]), "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    for name, values in _states(config, tensors):
        yield name, values * factors.get(name.split(".")[-2], 1)


def _granite_parts(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    mixes = bool(config.get("num_local_experts"))
    for name, values in _states(config, tensors):
        block = _layer(name)
        if name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(values, 2, axis=-2)
            yield f"blk.{block}.ffn_gate_exps.weight", gate
            yield f"blk.{block}.ffn_up_exps.weight", up
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(values, 2, axis=-2)
            end = "_shexp" if mixes else ""
            yield f"blk.{block}.ffn_gate{end}.weight", gate
            yield f"blk.{block}.ffn_up{end}.weight", up
        elif not mixes and name.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{block}.ffn_down.weight", values
        else:
            yield name, values


def _jamba_names(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in _states(config, tensors):
        yield name.replace(".feed_forward.experts.", ".mlp.experts."), values


def _delta(config: Config, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    heads = config["linear_num_key_heads"]
    key = config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    for name, values in _plus_one(config, dict(_states(config, tensors))):
        if "in_proj_qkvz" in name:
            block = _layer(name)
            grouped = values.reshape(heads, -1, values.shape[1])
            parts = np.split(grouped, np.cumsum([key, key, value]), axis=1)
            q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
            yield f"blk.{block}.attn_qkv.weight", np.concatenate([q, k, v])
            yield f"blk.{block}.attn_gate.weight", z
        else:
            yield name, values


RENAMED: dict[str, Callable[[Config, Tensors], Iterator[tuple[str, np.ndarray]]]] = {
    "bert": _bare_encoder, "bloom": _ungrouped, "deepseek2": _latent, "falcon": _ungrouped, "falcon-h1": _falcon_h1,
    "gemma": _plus_one, "gemma2": _plus_one, "gemma3n": _streams, "gemma4": _gemma4_names, "gpt-oss": _open_pairs,
    "gpt2": _transposed, "gptneox": _ungrouped, "granitehybrid": _granite_parts, "granitemoe": _granite_parts,
    "jamba": _jamba_names, "llama4": _open_halves, "mamba": _states, "mamba2": _states, "qwen3next": _delta,
    "stablelm": _norms_of_heads,
}  # fmt: skip
"""What conversion does to a family's tensors, under names that are a checkpoint's still, or llama.cpp's already."""
