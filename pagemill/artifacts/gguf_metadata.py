"""The metadata of a GGUF file in the vocabulary of a Hugging Face config.json.
Knows nothing about tokenizers' vocabularies, and reads no weight but the small table of RoPE factors."""

import math
from typing import Any, Final

import numpy as np

from pagemill.artifacts.config_fields import check_fields
from pagemill.artifacts.gguf_families import family_of
from pagemill.artifacts.gguf_family import GgufFamily, layer_of
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.errors import ModelError
from pagemill.messages.pooling_params import PoolingType
from pagemill.utils.text import shown, shown_name

# Llama 3.1 and later stretch RoPE with these constants; GGUF stores only the table that results from them.
_LLAMA3_ORIGINAL_POSITIONS: Final = 8192
_LLAMA3_LOW_FREQ_FACTOR: Final = 1.0
_LLAMA3_HIGH_FREQ_FACTOR: Final = 4.0

# Tokens that end a turn, by the text that their makers gave them; they count only where the chat template writes them.
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL: Final = 3
_YARN: Final = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
_POOLING: Final = {0: None, 1: PoolingType.MEAN, 2: PoolingType.CLS, 3: PoolingType.LAST}
NO_TOKEN: Final = 2**32 - 1
"""How converters write that there is no such token."""
_SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that the metadata amounts to, `architectures` included.

    Raises ModelError for a missing or impossible key and for what has no equal here: other architectures, experts or
    partial rotary embeddings where a family has none, unknown RoPE scaling.
    """
    family = family_of(file)
    keys = GgufKeys(file)
    arch = keys.text("general.architecture")
    config = dict(check_fields(file.path, _shape(file, keys, arch, family)))
    if family.turns:
        config |= _rope(file, keys, arch, config, family)
    return config | family.config(file, keys, config)


def eos_token_ids(file: GgufFile, tokens: list[str] | None = None) -> tuple[int, ...]:
    """Tokens that end the output: end of sequence, end of turn where a key or the chat template names one. `tokens`:
    the vocabulary, if it has been decoded."""
    keys = GgufKeys(file)
    found = [keys.integer(key) for key in (f"tokenizer.ggml.{name}" for name in _EOS_KEYS) if key in keys]
    found = [token for token in found if token != NO_TOKEN]
    template = keys.text("tokenizer.chat_template", "")
    wanted = [text for text in _TURN_ENDS if text in template]
    if wanted and "tokenizer.ggml.token_type" in keys:
        (control,) = np.nonzero(keys.numbers("tokenizer.ggml.token_type") == _CONTROL)
        tokens = keys.strings("tokenizer.ggml.tokens") if tokens is None else tokens
        found += [int(i) for i in control if i < len(tokens) and tokens[i] in wanted]
    return tuple(dict.fromkeys(found))


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """Default sampling parameters that the file recommends."""
    keys = GgufKeys(file)
    found = {name: keys.number(key) for key, name in _named_sampling() if key in keys}
    return {name: int(value) if name == "top_k" else value for name, value in found.items()}


def unused_sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """What the file recommends besides them."""
    used = {key for key, _ in _named_sampling()}
    prefix = "general.sampling."
    return {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix) and key not in used and isinstance(value, (bool, int, float, str))
    }


def pooling_type(file: GgufFile) -> PoolingType | None:
    """How hidden states become the vector of a text, where the file says it. Raises ModelError for another way."""
    keys = GgufKeys(file)
    key = f"{keys.text('general.architecture')}.pooling_type"
    if key not in keys:
        return None
    found = keys.integer(key)
    if found not in _POOLING:
        words = ", ".join(f"{number} ({kind.name.lower() if kind else 'none'})" for number, kind in _POOLING.items())
        raise ModelError(f"{file.path}: {key}={found} is not supported; supported: {words}")
    return _POOLING[found]


def checkpoint_dtype(file: GgufFile) -> str:
    """float32 or float16 when every matrix is of that type, else bfloat16."""
    types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _named_sampling() -> list[tuple[str, str]]:
    return [(f"general.sampling.{key}", name) for key, name in _SAMPLING.items()]


def _shape(file: GgufFile, keys: GgufKeys, arch: str, family: GgufFamily) -> dict[str, Any]:
    """What every architecture has."""
    if keys.integer(f"{arch}.expert_count", 0) > 0 and not family.mixes:
        raise ModelError(f"{file.path}: mixtures of experts are not supported ({arch}.expert_count)")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no matrix token_embd.weight")
    # Files of layers with states alone say 0 heads.
    num_heads = keys.integer(f"{arch}.attention.head_count") or (0 if family.turns else 1)
    hidden_size = keys.integer(f"{arch}.embedding_length")
    if num_heads < 1 or hidden_size != embedding.shape[1]:
        raise ModelError(
            f"{file.path}: {arch}.attention.head_count={num_heads} and {arch}.embedding_length={hidden_size} "
            f"do not fit token_embd.weight of shape {embedding.shape}"
        )

    num_blocks = keys.integer(f"{arch}.block_count")
    beyond = next((name for name in file.tensors if (layer_of(name) or 0) >= max(num_blocks, 1)), None)
    if beyond is not None:
        raise ModelError(f"{file.path}: {arch}.block_count={num_blocks}, and there is a tensor {shown_name(beyond)}")

    def size(name: str, default: int | None = None) -> int:
        return (keys.largest if name in family.varies else keys.integer)(f"{arch}.{name}", default)

    head = file.tensors.get("output.weight")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length", 0 if family.mixes else None) or None,
        "num_hidden_layers": num_blocks - keys.integer(f"{arch}.nextn_predict_layers", 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": _head_size(file, keys, arch, family, hidden_size // num_heads),
        **_eps(keys, arch),
        "max_position_embeddings": keys.integer(f"{arch}.context_length"),
        "vocab_size": (head or embedding).shape[0],
        "tie_word_embeddings": head is None,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _head_size(file: GgufFile, keys: GgufKeys, arch: str, family: GgufFamily, default: int) -> int:
    if family.latent:
        return keys.integer(f"{arch}.rope.dimension_count")
    size = keys.integer(f"{arch}.attention.key_length", default)
    if keys.integer(f"{arch}.attention.value_length", size) != size:
        raise ModelError(f"{file.path}: keys and values of different size are not supported")
    return size


def _eps(keys: GgufKeys, arch: str) -> dict[str, float]:
    """Of LayerNorms, or of RMS norms, which are the rule."""
    layer_norm = f"{arch}.attention.layer_norm_epsilon"
    if layer_norm in keys:
        return {"layer_norm_eps": keys.number(layer_norm)}
    return {"rms_norm_eps": keys.number(f"{arch}.attention.layer_norm_rms_epsilon")}


def _rope(file: GgufFile, keys: GgufKeys, arch: str, config: dict[str, Any], family: GgufFamily) -> dict[str, Any]:
    rotated = keys.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"] and not (family.turns_part and 0 < rotated < config["head_dim"]):
        raise ModelError(
            f"{file.path}: partial rotary embedding ({rotated} of {config['head_dim']} dimensions) is not supported"
        )
    theta = keys.number(f"{arch}.rope.freq_base", family.rope_theta)
    if "rope_freqs.weight" in file.tensors:
        scaling: dict[str, Any] | None = _divided(file, rotated, theta)
    elif "rope_factors_long.weight" in file.tensors:
        scaling = _long_rope(file, keys, arch, rotated)
    else:
        scaling = _keyed_scaling(file, keys, arch, config)
    found = {"rope_theta": theta, "rope_scaling": scaling}
    if rotated == config["head_dim"]:
        return found
    return found | {"partial_rotary_factor": rotated / config["head_dim"]}


def _keyed_scaling(file: GgufFile, keys: GgufKeys, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = keys.text(f"{prefix}.type", "linear" if f"{prefix}.factor" in keys else "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{file.path}: RoPE scaling {shown(kind)} is not supported; supported: none, linear, yarn, llama3"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number(f"{prefix}.factor")}
    if kind == "yarn":
        original = f"{prefix}.original_context_length"
        scaling["original_max_position_embeddings"] = keys.integer(original, config["max_position_embeddings"])
        for name, theirs in _YARN.items():
            if f"{prefix}.{theirs}" in keys:
                scaling[name] = keys.number(f"{prefix}.{theirs}")
    return scaling


def _long_rope(file: GgufFile, keys: GgufKeys, arch: str, rotated: int) -> dict[str, Any]:
    """The divisors of frequencies within the length of the training, and beyond it."""
    prefix = f"{arch}.rope.scaling"
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.integer(f"{prefix}.original_context_length"),
    }
    for name in ("long", "short"):
        table = _table(file, f"rope_factors_{name}.weight", rotated)
        scaling[f"{name}_factor"] = [float(value) for value in table]
    if f"{prefix}.attn_factor" in keys:
        scaling["attention_factor"] = keys.number(f"{prefix}.attn_factor")
    return scaling


def _divided(file: GgufFile, rotated: int, theta: float) -> dict[str, Any]:
    """The settings behind a table of divisors of frequencies: Llama 3's, where they give the same, or the table."""
    table = _table(file, "rope_freqs.weight", rotated)
    factor = float(table.max())
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    periods = _LLAMA3_ORIGINAL_POSITIONS / wavelength
    ramp = (periods - _LLAMA3_LOW_FREQ_FACTOR) / (_LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR)
    smooth = np.clip(ramp, 0.0, 1.0)
    if factor < 1 or not np.allclose(1 / ((1 - smooth) / factor + smooth), table, rtol=1e-3):
        divisors = [float(value) for value in table]
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL_POSITIONS,
        }
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_POSITIONS,
    }


def _table(file: GgufFile, name: str, rotated: int) -> "np.ndarray[Any, Any]":
    """Divisors of frequencies, [rotated / 2] float64. Raises ModelError for what cannot be some."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.shape != (rotated // 2,):
        found = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ModelError(f"{file.path}: {name} is {found}: it is to be {rotated // 2} numbers")
    table = file.floats(tensor)
    if not (np.isfinite(table) & (table > 0)).all():
        raise ModelError(f"{file.path}: {name} has values that are no finite numbers above 0")
    return table
