"""What the files of heads say that read one hidden state of another model and keep nothing: Medusa as published first
(names are numbers, medusa_lm_head.safetensors) and as engines converted it, MLP speculators as IBM publishes them.
Knows nothing about how a head computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.config_fields import Rule, check_fields, integer
from pagemill.artifacts.hf_config import quantization_config, require_safetensors
from pagemill.artifacts.json_file import read_json_object
from pagemill.artifacts.weight_index import names_of_weight_files, safetensors_header
from pagemill.catalog.heads import MEDUSA, NUM_ROW_HEADS, ROW_HEADS
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.utils.text import shown

_HEADS: Final = integer(1, 64)
_SIZE: Final = integer(1, 2**24)
_INNER: Final = integer(0, 2**24)
_VOCABULARY: Final = integer(1, 2**27)
_PREFIXES: Final = ("medusa_heads.", "medusa_head.")


def row_heads_method(folder: Path) -> str | None:
    """The method of such heads that a folder has; None where its config.json is of something else."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json_object(folder / "config.json")
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    for method, architecture in ROW_HEADS.items():
        if config.get("model_type") == method or named == architecture:
            return method
    return MEDUSA if "medusa_num_heads" in config else None


def describe_row_heads(name: str, path: Path, model: ModelFacts, method: str, load_format: str) -> ModelFacts:
    """Facts of the heads at `path`, which are to propose tokens of `model` by `method`. load_format "dummy" needs no
    weights. Raises ModelError for files that are damaged, missing or no such heads."""
    if path.is_file() or not (path / "config.json").is_file():
        raise ModelError(f"{name} is no folder with config.json and safetensors, as heads of method {method!r} are")
    if row_heads_method(path) != method:
        raise ModelError(f"{name}: its config.json is not that of heads of method {method!r} ({ROW_HEADS[method]})")
    config = read_json_object(path / "config.json")
    dummy = load_format == "dummy"
    if not dummy:
        require_safetensors(path)
    shapes = {} if dummy else _shapes(path)
    read = _medusa if method == MEDUSA else _mlp_speculator
    fields = read(name, config, shapes, model)
    return ModelFacts(
        name=name,
        path=str(path),
        weights_format="dummy" if dummy else "safetensors",
        architecture=ROW_HEADS[method],
        # No layers that attend, so their number says nothing; every model has one.
        hf_config=check_fields(name, {"num_hidden_layers": 1, "tie_word_embeddings": False, **fields}),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        max_position=model.max_position,
        vocab_size=fields["vocab_size"],
        quantization_config=quantization_config(config),
    )


def _medusa(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: ModelFacts
) -> dict[str, Any]:
    layers = _number(name, config, ("medusa_num_layers", "num_hidden_layers"), _HEADS, 1)
    numbered = any(key.partition(".")[0].isdecimal() for key in shapes)
    block, head = ("0.0.linear.weight", f"0.{layers}.weight") if numbered else ("blocks.0.layers.0.weight", "")
    if not numbered:
        head = "lm_heads.0.weight" if "lm_heads.0.weight" in shapes else "lm_head.weight"
    whose = "own"
    if numbered or config.get("original_lm_head"):
        whose = "of the model" if shapes and head not in shapes else "own" if numbered else "shared"
    vocabulary = int(shapes[head][0]) if shapes.get(head) else model.vocab_size
    truncated = config.get("truncated_vocab_size")
    vocab_size = _number(name, config, ("vocab_size",), _VOCABULARY, vocabulary)
    if truncated not in (None, vocab_size):
        raise ModelError(
            f"{name}: truncated_vocab_size={shown(truncated)} is not supported: heads guess all {vocab_size} tokens"
        )
    has_bias = any(key.endswith(".bias") for key in shapes) if shapes else "medusa_num_heads" in config
    size = shapes[block][0] if shapes.get(block) else int(model.hf_config["hidden_size"])
    return {
        NUM_ROW_HEADS: _number(name, config, ("medusa_num_heads", "num_heads"), _HEADS),
        "hidden_size": _number(name, config, ("hidden_size",), _SIZE, size),
        "vocab_size": vocab_size,
        "num_block_layers": layers,
        "numbered_names": numbered,
        "output_heads": whose,
        "medusa_fc_bias": has_bias or bool(config.get("medusa_fc_bias")),
    }


def _mlp_speculator(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: ModelFacts
) -> dict[str, Any]:
    size = _number(name, config, ("emb_dim", "hidden_size"), _SIZE)
    return {
        NUM_ROW_HEADS: _number(name, config, ("n_predict",), _HEADS),
        "hidden_size": size,
        "vocab_size": _number(name, config, ("vocab_size",), _VOCABULARY),
        "inner_dim": _number(name, config, ("inner_dim",), _INNER, 0) or size,
        "tie_weights": _flag(name, config, "tie_weights"),
        "scale_input": _flag(name, config, "scale_input"),
    }


def _number(name: str, config: Mapping[str, Any], keys: tuple[str, ...], rule: Rule, default: object = None) -> int:
    """The first of these fields that is there. Raises ModelError where it may not have its value, or there is none."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default)
    value = default if value is None else value
    if value is None or not rule.allows(value):
        raise ModelError(f"{name}: {key}={shown(value)} in its config.json is not {rule.words}")
    return int(str(value))


def _flag(name: str, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"{name}: {key}={shown(value)} in its config.json is not true or false")
    return value


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors, by their names without what some put before them. Raises ModelError for files that are
    damaged."""
    found: dict[str, tuple[int, ...]] = {}
    for file in names_of_weight_files(folder):
        for key, entry in safetensors_header(folder / file).items():
            shape = entry.get("shape") if isinstance(entry, dict) else None
            if key != "__metadata__" and isinstance(shape, list) and all(isinstance(size, int) for size in shape):
                for prefix in _PREFIXES:
                    key = key.removeprefix(prefix)
                found[key] = tuple(shape)
    return found
