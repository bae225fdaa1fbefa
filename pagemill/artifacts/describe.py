"""From what the user typed to files on this machine, and from the files to `ModelFacts`.
Knows nothing about the device or about how a model is computed."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts import aliases, gguf_metadata, hf_config, hub
from pagemill.artifacts.config_fields import check_fields, check_sizes
from pagemill.artifacts.config_names import SIZES, with_common_names
from pagemill.artifacts.generation_config import GenerationConfig, named_generation_config, overridden
from pagemill.artifacts.gguf_file import read_gguf
from pagemill.artifacts.pooling_heads import head_of, known_architecture
from pagemill.artifacts.sentence_pooling import max_text_tokens, sentence_pooling
from pagemill.artifacts.token_ids import token_id_in
from pagemill.artifacts.transformers_config import hf_config_of, why_not
from pagemill.catalog.models import ENCODERS, MODELS, NATIVE, TRANSFORMERS
from pagemill.catalog.quantization import QUANTIZED_CHECKPOINTS
from pagemill.catalog.weights import AUTO, IN_FILES, SHARDED_STATE
from pagemill.config.facts import ModelFacts
from pagemill.config.pooling_facts import HeadFacts
from pagemill.errors import ModelError
from pagemill.messages.pooling_params import PoolingType
from pagemill.utils.reasons import reason
from pagemill.utils.text import shown, shown_name

_PADDED_POSITIONS: Final = ("CamembertModel", "RobertaModel", "XLMRobertaModel")


def locate(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    ignore_patterns: Sequence[str] = (),
) -> Path:
    """Folder or .gguf file of an alias, a path or a hub id, fetched when it is not on this machine.

    An alias wins over a folder of the same name (write ./name for that). Without `weights`, a repository of the hub is
    fetched without them, and always without what fits a pattern to be ignored. Raises ModelError.
    """
    if model in aliases.ALIASES:
        return aliases.fetch(model)
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long; a home that is nobody's
        raise ModelError(f"{shown_name(model)}: no such file or folder ({reason(error)[:100]})") from error
    if model and is_dir:
        return _gguf_inside(path)
    if model and is_file:
        return path
    if model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf"):
        raise ModelError(f"{model}: no such file or folder")
    if not hub.is_hub_id(model):
        raise ModelError(
            f"{model or repr(model)} is not an alias (known: {', '.join(sorted(aliases.ALIASES))}), "
            "not a file or folder here, and not a hub id (org/name)"
        )
    return hub.snapshot(model, revision, download_dir, weights=weights, ignore_patterns=ignore_patterns)


def describe(
    name: str,
    path: Path,
    hf_overrides: Mapping[str, object] | None = None,
    generation_config: str = "auto",
    override_generation_config: Mapping[str, object] | None = None,
    load_format: str = "auto",
    model_impl: str = "auto",
) -> ModelFacts:
    """Facts of the model at `path`; `name` is what the user called it.

    hf_overrides is laid over the config; generation_config "auto" means the model's own recommendations for sampling,
    "vllm" none, anything else a folder that has them, and override_generation_config is laid over those; load_format
    "dummy" needs no weights, and only those that are files of a known format are looked for here; model_impl says whose
    implementation runs. Raises ModelError for damaged, missing or unsupported files, ConfigError for settings that name
    no such folder or no such recommendation.
    """
    facts = _from_gguf(name, path) if path.is_file() else _from_folder(name, path, load_format)
    config = hf_config.with_classic_rope(with_common_names(hf_config.laid_over(facts.hf_config, hf_overrides or {})))
    named = _first(config.get("architectures")) or facts.architecture
    architecture, ending = known_architecture(named)
    implementation = _implementation(name, architecture, config, model_impl, facts.weights_format)
    if implementation == TRANSFORMERS:
        config = with_common_names(config, hf_config_of(name, config))
    quantization = hf_config.quantization_config(config)
    if quantization and quantization["quant_method"] not in QUANTIZED_CHECKPOINTS:
        raise ModelError(
            f"{name}: quant_method {shown(quantization['quant_method'])} in its quantization_config is not supported; "
            f"supported: {', '.join(sorted(QUANTIZED_CHECKPOINTS))}"
        )
    if load_format in (*IN_FILES, SHARDED_STATE) and load_format != facts.weights_format:
        raise ModelError(f"{name}: load_format={load_format!r}, but the weights are {facts.weights_format}")
    head = head_of(ending, config, lambda token: token_id_in(path, token))
    generation = _generation(facts, generation_config, override_generation_config or {})
    return dataclasses.replace(
        facts,
        weights_format=facts.weights_format if load_format == AUTO else load_format,
        architecture=architecture,
        implementation=implementation,
        has_head=architecture == named and architecture not in ENCODERS,
        is_encoder=architecture in ENCODERS,
        head=head,
        pooling_type=_pooling_type(facts, architecture, head, config),
        hf_config=check_fields(name, config) if implementation == NATIVE else check_sizes(name, config, SIZES),
        quantization_config=quantization,
        max_position=_max_position(name, config, architecture, facts),
        vocab_size=_positive(name, config, "vocab_size"),
        generation_defaults=generation.defaults,
        unused_generation_defaults=generation.unused,
        eos_token_ids=generation.eos_token_ids,
    )


def _generation(facts: ModelFacts, source: str, overrides: Mapping[str, object]) -> GenerationConfig:
    """What is recommended in the end. The model's end-of-sequence ids are kept unless others are given."""
    if source == "auto":
        found = GenerationConfig(facts.generation_defaults, facts.unused_generation_defaults)
    else:
        found = GenerationConfig() if source == "vllm" else named_generation_config(source)
    eos = found.eos_token_ids or facts.eos_token_ids
    return overridden(dataclasses.replace(found, eos_token_ids=eos), overrides)


def _gguf_inside(folder: Path) -> Path:
    """The folder itself, or the one .gguf file in it when it has no config.json."""
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{folder} has several .gguf files; name one: {', '.join(file.name for file in files)}")
    return files[0] if files else folder


def _from_gguf(name: str, path: Path) -> ModelFacts:
    file = read_gguf(path)
    config = gguf_metadata.hf_config(file)
    return ModelFacts(
        name=name,
        path=str(path),
        weights_format="gguf",
        architecture=config["architectures"][0],
        hf_config=config,
        dtype=gguf_metadata.checkpoint_dtype(file),
        max_position=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_token_ids=gguf_metadata.eos_token_ids(file),
        generation_defaults=gguf_metadata.sampling_defaults(file),
        unused_generation_defaults=gguf_metadata.unused_sampling_defaults(file),
        pooling_type=gguf_metadata.pooling_type(file),
    )


def _from_folder(name: str, path: Path, load_format: str) -> ModelFacts:
    """Facts whose sizes are still 0: overrides may change what config.json says about them."""
    folder = hf_config.read_folder(path)
    if load_format in (AUTO, *IN_FILES):
        hf_config.require_safetensors(path)
    pooling = sentence_pooling(path)
    return ModelFacts(
        name=name,
        path=str(path),
        weights_format=SHARDED_STATE if load_format == SHARDED_STATE else "safetensors",
        architecture=folder.architecture,
        hf_config=folder.config,
        dtype=folder.dtype,
        max_position=0,
        vocab_size=0,
        eos_token_ids=folder.eos_token_ids,
        generation_defaults=dict(folder.generation.defaults),
        unused_generation_defaults=dict(folder.generation.unused),
        pooling_type=None if pooling is None else pooling.pooling_type,
        normalizes=pooling is None or pooling.normalizes,
    )


def _pooling_type(
    facts: ModelFacts, architecture: str, head: HeadFacts | None, config: Mapping[str, Any]
) -> PoolingType | None:
    """What the files say, or what models of the kind do: a head for each token reads all of them, one for prompts and
    an encoder the first token or the mean, of a decoder the last."""
    if head is not None and head.per_token:
        return PoolingType.ALL
    if architecture not in ENCODERS:
        return PoolingType.LAST if head is not None else facts.pooling_type
    if head is not None:
        return PoolingType.MEAN if config.get("classifier_pooling") == "mean" else PoolingType.CLS
    return facts.pooling_type or PoolingType.CLS


def _max_position(name: str, config: dict[str, Any], architecture: str, facts: ModelFacts) -> int:
    """Tokens that fit: as many as there are positions, which begin behind the padding's in RoBERTa's tables; or as
    sentence-transformers says."""
    most = _positive(name, config, "max_position_embeddings")
    if architecture in _PADDED_POSITIONS:
        padding = config.get("pad_token_id")
        most -= (1 if padding is None else int(padding)) + 1
    asked = max_text_tokens(Path(facts.path))
    return most if asked is None else min(most, asked)


def _implementation(name: str, architecture: str, config: Mapping[str, Any], asked: str, weights_format: str) -> str:
    """Whose code computes the model: NATIVE or TRANSFORMERS. Raises ModelError where nobody's can."""
    if architecture in ENCODERS or (architecture in MODELS and asked != TRANSFORMERS):
        return NATIVE
    if weights_format == "gguf":
        why: str | None = "of a GGUF file only what is implemented here can run"
    elif asked in (NATIVE, "vllm"):
        why = f"model_impl={asked!r} keeps the implementation of transformers from being tried"
    else:
        why = why_not(architecture, config)
    if why is None:
        return TRANSFORMERS
    by = " by transformers" if asked == TRANSFORMERS else ""
    known = ", ".join(sorted({*MODELS, *ENCODERS}))
    raise ModelError(f"{name}: architecture {shown(architecture)} is not supported{by}; supported: {known} ({why})")


def _first(names: object) -> str | None:
    return str(names[0]) if isinstance(names, list) and names else None


def _positive(name: str, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name}: {key}={shown(value)} in its config is not a positive integer")
    return value
