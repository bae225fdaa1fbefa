"""What the files of a head say that proposes tokens from hidden states of another model: as EAGLE publishes them, in
the format of `speculators`, or in the checkpoint of the model itself. Knows nothing about how a head computes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.config_fields import check_fields
from pagemill.artifacts.config_names import with_common_names
from pagemill.artifacts.dflash import dflash_fields
from pagemill.artifacts.hf_config import quantization_config, read_folder, require_safetensors, with_classic_rope
from pagemill.artifacts.json_file import read_json_object
from pagemill.artifacts.weight_index import INDEX, SINGLE, names_of_weight_files, safetensors_header
from pagemill.catalog.heads import (
    COUNTED_LAYERS,
    DFLASH,
    EAGLE,
    EAGLE3,
    HEADS,
    METHODS,
    MTP,
    OTHER_NAMES,
    OWN_LAYERS,
    PEAGLE,
)
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.utils.text import shown

MASK_TOKENS: Final = ("mask_token_id", "pard_token", "ptd_token_id")
"""What heads call the token that stands for those that are not known yet."""
_SPECULATORS: Final = (DFLASH, EAGLE3, PEAGLE)
"""Kinds of heads in the format of `speculators`."""
LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_PARTS: Final = ("transformer_layer_config", "eagle_config", "dflash_config")
"""Objects within the config of a head."""
_LLAMA: Final = "LlamaForCausalLM"
"""What heads of EAGLE call themselves, as the model does whose layers theirs are like."""
_SAME_NAME: Final = {
    (EAGLE, _LLAMA): "EagleLlamaForCausalLM",
    (PEAGLE, "Eagle3LlamaForCausalLM"): "PeagleLlamaForCausalLM",
}
"""Of a method, architectures whose names do not tell them from others -> what they are called here."""


@dataclass(frozen=True)
class Speculator:
    """A checkpoint in the format of `speculators`, which says what it is for."""

    method: str
    verifier: str
    """The model whose tokens it guesses: alias, folder or hub id."""
    num_tokens: int | None
    """That it proposes, where it says so."""


def speculator_of(folder: Path) -> Speculator | None:
    """What such a checkpoint says; None where the folder is none. Raises ModelError for one that is damaged, or whose
    kind is not known."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json_object(folder / "config.json")
    kind = config.get("speculators_model_type")
    settings = config.get("speculators_config")
    if kind is None and settings is None:
        return None
    if kind not in _SPECULATORS:
        known = ", ".join(_SPECULATORS)
        raise ModelError(f"{folder}: speculators_model_type={shown(kind)} is not supported; supported: {known}")
    verifier = settings.get("verifier") if isinstance(settings, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        raise ModelError(f"{folder}: speculators_config in its config.json names no verifier")
    return Speculator(kind, name, _num_tokens(settings))


def _num_tokens(settings: Any) -> int | None:
    """Of the default method of proposing, else of the first."""
    methods = settings.get("proposal_methods")
    found = [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []
    default = settings.get("default_proposal_method")
    found.sort(key=lambda method: method.get("proposal_type") != default)
    count = found[0].get("speculative_tokens") if found else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def head_method(folder: Path) -> str | None:
    """The method of the head that a folder has; None where its config.json names none."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json_object(folder / "config.json")
    if config.get("speculators_model_type") is not None:
        found = speculator_of(folder)
        return None if found is None else found.method
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name == _LLAMA and ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return EAGLE if "fc.weight" in _tensor_names(folder) else None
    method = METHODS.get(OTHER_NAMES.get(name, name))
    return PEAGLE if method == EAGLE3 and _mask_token(config) is not None else method


def _mask_token(config: Mapping[str, Any]) -> Any:
    """What stands for tokens that are not known yet, of a head that guesses several at once."""
    return next((config[key] for key in MASK_TOKENS if config.get(key) is not None), None)


def describe_head(name: str, path: Path, model: ModelFacts, method: str, load_format: str) -> ModelFacts:
    """Facts of the head at `path`, which is to propose tokens of `model` by `method`. load_format "dummy" needs no
    weights. Raises ModelError for files that are damaged, missing or no such head."""
    if method == MTP:
        return _own_head(model)
    if path.is_file():
        raise ModelError(f"{name} is a file; a head is a folder with config.json and safetensors")
    folder = read_folder(path)
    config = _flat(folder.config)
    named = OTHER_NAMES.get(folder.architecture, folder.architecture)
    architecture = _SAME_NAME.get((method, named), named)
    reads_layers = method in (EAGLE3, PEAGLE, DFLASH)
    if METHODS.get(architecture) != method:
        known = ", ".join(sorted({*HEADS, *OTHER_NAMES} - {*OWN_LAYERS.values()}))
        raise ModelError(
            f"{name}: architecture {shown(folder.architecture)} is no head of method {method!r}; known heads: {known}"
        )
    dummy = load_format == "dummy"
    if not dummy:
        require_safetensors(path)
    draft_vocab = config.get("draft_vocab_size") or config.get("vocab_size")
    names = set() if dummy else _tensor_names(path)
    maps = reads_layers and (draft_vocab != config.get("vocab_size") or "d2t" in names)
    config |= {
        "own_embeddings": "embed_tokens.weight" in names,
        "own_head": "lm_head.weight" in names or maps,
        "maps_vocabulary": maps,
        "tie_word_embeddings": False,
    }
    if reads_layers:
        config |= (
            dflash_fields(name, config, model) if method == DFLASH else {LAYER_IDS: _layer_ids(name, config, model)}
        )
    config = check_fields(name, with_classic_rope(with_common_names(config)))
    lacking = [key for key in ("vocab_size", "max_position_embeddings") if config.get(key) is None]
    if lacking:
        raise ModelError(f"{name}: its config.json has no {lacking[0]}")
    if not isinstance(draft_vocab, int) or not 0 < draft_vocab <= config["vocab_size"]:
        raise ModelError(f"{name}: draft_vocab_size={shown(draft_vocab)} is not within 1 to {config['vocab_size']}")
    if method in (PEAGLE, DFLASH):
        config["mask_token_id"] = _checked_mask(name, config)
    return ModelFacts(
        name=name,
        path=str(path),
        weights_format="dummy" if dummy else "safetensors",
        architecture=architecture,
        hf_config=config,
        dtype=folder.dtype,
        max_position=config["max_position_embeddings"],
        vocab_size=draft_vocab,
        quantization_config=quantization_config(config),
    )


def _checked_mask(name: str, config: Mapping[str, Any]) -> int:
    mask = _mask_token(config)
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < config["vocab_size"]:
        raise ModelError(f"{name}: mask_token_id={shown(mask)} is not within 0 to {config['vocab_size'] - 1}")
    return mask


def _own_head(model: ModelFacts) -> ModelFacts:
    """The head that a model's own checkpoint has."""
    architecture = OWN_LAYERS.get(model.architecture)
    if architecture is None:
        raise ModelError(
            f"{model.name}: method={MTP!r} needs layers that predict more tokens in its own checkpoint, as of "
            f"{', '.join(OWN_LAYERS)}; its architecture is {model.architecture}"
        )
    counted = model.hf_config.get("num_nextn_predict_layers", 0 if model.architecture in COUNTED_LAYERS else 1)
    if not counted:
        raise ModelError(f"{model.name}: method={MTP!r} needs num_nextn_predict_layers in its config.json")
    return dataclasses.replace(model, architecture=architecture)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a head with the sizes of its layers beside what else it says."""
    found: dict[str, Any] = {}
    # Layers and heads have architectures and a model_type; what the head says of itself counts.
    for part in _PARTS:
        inner = config.get(part)
        found |= inner if isinstance(inner, dict) else {}
    return found | {key: value for key, value in config.items() if key not in _PARTS}


def _layer_ids(name: str, config: Mapping[str, Any], model: ModelFacts) -> list[int]:
    """The layers of the model that are read: as the head says, or as EAGLE-3 does."""
    count = int(model.hf_config.get("num_hidden_layers") or 0)
    found = config.get(LAYER_IDS)
    if found is None:
        found = [2, count // 2, count - 3]
    valid = isinstance(found, list) and 0 < len(found) <= count
    if not valid or not all(isinstance(index, int) and 0 <= index <= count for index in found):
        raise ModelError(f"{name}: {LAYER_IDS}={shown(found)} are not layers of {model.name}, which has {count}")
    return list(found)


def _tensor_names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint, without what some put before them. Raises ModelError."""
    if (folder / INDEX).exists():
        names = read_json_object(folder / INDEX).get("weight_map")
        found = set(names) if isinstance(names, dict) else set()
    else:
        found = {key for file in names_of_weight_files(folder) for key in safetensors_header(folder / file)}
    return {key.removeprefix("model.") for key in found}
