"""What the config.json of a DFlash head says, as it is published and in the format of `speculators`. Knows nothing
about how such a head computes."""

from collections.abc import Mapping
from typing import Any, Final

from pagemill.artifacts.config_fields import FLAG
from pagemill.catalog.heads import BLOCK_SIZE, MOST_GUESSES
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.utils.text import shown

MAX_BLOCK: Final = 256
_IDS: Final = "target_layer_ids"
_SPECULATORS_IDS: Final = "aux_hidden_state_layer_ids"
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
}
"""Fields of heads that guess in other ways -> what they are for those that are known here."""
_FLAGS: Final = ("is_causal", "causal", "use_swa", "sliding_window_non_causal")


def dflash_fields(name: str, config: Mapping[str, Any], model: ModelFacts) -> dict[str, Any]:
    """The fields that are added to a head's flat config, its layer ids as those of layers whose inputs are read. Raises
    ModelError."""
    for field, allowed in _ONLY.items():
        value = config.get(field)
        if value is not None and value not in allowed:
            known = " or ".join(map(shown, allowed))
            raise ModelError(f"{name}: {field}={shown(value)} is not supported for DFlash heads: it is to be {known}")
    for field in _FLAGS:
        if not FLAG.allows(config.get(field)):
            raise ModelError(f"{name}: {field}={shown(config[field])} is to be {FLAG.words}")
    size = config.get(BLOCK_SIZE)
    if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= MAX_BLOCK:
        raise ModelError(f"{name}: {BLOCK_SIZE}={shown(size)} is not within 2 to {MAX_BLOCK}")
    return {"eagle_aux_hidden_state_layer_ids": _read_layers(name, config, model), MOST_GUESSES: size - 1}


def _read_layers(name: str, config: Mapping[str, Any], model: ModelFacts) -> list[int]:
    """As published, an id is that of a layer whose result is read; in the format of `speculators`, of one whose input
    is."""
    count = int(model.hf_config.get("num_hidden_layers") or 0)
    field, shift = (_IDS, 1) if config.get(_IDS) is not None else (_SPECULATORS_IDS, 0)
    found = config.get(field)
    valid = isinstance(found, list) and 0 < len(found) <= count
    last = count - shift
    if not valid or not all(
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index <= last for index in found or ()
    ):
        raise ModelError(
            f"{name}: {field}={shown(found)} are not layers of {model.name}: it has {count}, and ids are 0 to {last}"
        )
    return [index + shift for index in found or ()]
