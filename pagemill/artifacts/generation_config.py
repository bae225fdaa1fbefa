"""What a model recommends for sampling: a generation_config.json, and what the user lays over it.
Knows nothing about how tokens are sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pagemill.artifacts.json_file import read_json_object, read_optional_json_object
from pagemill.errors import ConfigError, ModelError
from pagemill.utils.text import shown

FILE: Final = "generation_config.json"
_NUMBERS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_EOS: Final = "eos_token_id"
_UNUSED: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "typical_p": (1,),
}
"""What may be recommended and has no effect here -> values, besides null, that ask for nothing."""


@dataclass(frozen=True)
class GenerationConfig:
    """Recommended values, by the names of Hugging Face."""

    defaults: dict[str, float | int] = field(default_factory=dict)
    """Those that have an effect, where given."""
    unused: dict[str, Any] = field(default_factory=dict)
    """Those that have none, and ask for something."""
    eos_token_ids: tuple[int, ...] = ()


def read_generation_config(folder: Path) -> GenerationConfig:
    """The file of a model's folder; empty when there is none. Raises ModelError for one that is damaged."""
    return _parsed(str(folder / FILE), read_optional_json_object(folder / FILE))


def named_generation_config(name: str) -> GenerationConfig:
    """The file that --generation-config names: itself, or the folder that it is in. Raises ConfigError when it is not
    there, ModelError when it is damaged."""
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"generation_config={name!r} is not allowed: auto, vllm, or a folder with a {FILE}, which is not there"
        )
    return _parsed(str(file), read_json_object(file))


def overridden(config: GenerationConfig, overrides: Mapping[str, Any]) -> GenerationConfig:
    """Values of --override-generation-config in place of those of the file; null takes one back. Raises ConfigError for
    a name that has no effect, or a value of the wrong type."""
    unknown = sorted(set(overrides) - {*_NUMBERS, _EOS})
    if unknown:
        raise ConfigError(
            f"override_generation_config has {shown(unknown[0])}; what it may have: {', '.join((*_NUMBERS, _EOS))}"
        )
    try:
        given = _parsed("override_generation_config", overrides)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    kept = {name: value for name, value in config.defaults.items() if name not in overrides}
    eos = given.eos_token_ids if _EOS in overrides else config.eos_token_ids
    return GenerationConfig(kept | given.defaults, config.unused, eos)


def token_ids(where: str, value: Any) -> tuple[int, ...]:
    """End-of-sequence ids: Hugging Face writes one id, a list, or null. Raises ModelError for anything else."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{where}: eos_token_id={shown(value)} is not a token id or a list of them")
    return tuple(ids)


def _parsed(where: str, content: Mapping[str, Any]) -> GenerationConfig:
    defaults = {name: content[name] for name in _NUMBERS if content.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{where}: {name}={shown(value)} is not a number")
    unused = {
        name: content[name]
        for name, neutral in _UNUSED.items()
        if content.get(name) is not None and content[name] not in neutral
    }
    return GenerationConfig(defaults, unused, token_ids(where, content.get(_EOS)))
