"""What transformers knows about an architecture that has no implementation here: whether it can compute it, and its own
object for the config. Imports transformers when asked, and never code of a model's folder."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

from pagemill.artifacts.config_fields import MAX_LAYERS
from pagemill.errors import ModelError
from pagemill.utils.reasons import reason
from pagemill.utils.text import shown

PACKAGE: Final = "transformers"
LOWEST_VERSION: Final = 5
MAX_INTEGER: Final = 2**31
_NO_LAYERS: Final = ("layer_norm", "layernorm", "layer_types", "max_window_layers")


def is_installed() -> bool:
    """Whether there is a package of that name; its version is looked at when it is needed."""
    return find_spec(PACKAGE) is not None


def why_not(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Why transformers cannot compute an architecture of config.json; None: it may."""
    if not is_installed():
        return f"the package {PACKAGE}, whose implementation could run, is not installed (pip install '{PACKAGE}>=5')"
    import transformers  # optional: transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # optional: transformers

    if int(transformers.__version__.split(".")[0]) < LOWEST_VERSION:
        return f"{PACKAGE} {transformers.__version__} is older than {LOWEST_VERSION}"
    here = f"{PACKAGE} {transformers.__version__}"
    if config.get("auto_map") and architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"{here} does not have it, and code of a model's folder is never run"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{here} has no causal language model of model_type {shown(kind)}"
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != architecture:
        return f"{here} has no causal language model of that name for model_type {shown(kind)}"
    return None


def hf_config_of(name: str, config: Mapping[str, Any]) -> Any:
    """transformers' own object for a config.json: `config_names.with_common_names` takes what it adds. `name`: the
    model, for messages. Raises ModelError for values that transformers does not take, and sizes out of bounds."""
    from transformers import AutoConfig  # optional: transformers

    _check_integers(name, config)
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    try:
        made = AutoConfig.for_model(config["model_type"], **fields)
        return made.get_text_config(decoder=True)
    except Exception as error:  # checks of fields are many libraries' errors
        raise ModelError(f"{name}: {PACKAGE} cannot read its config: {reason(error)}") from error


def _check_integers(name: str, config: Mapping[str, Any], prefix: str = "") -> None:
    """Sizes whose names are known to nobody here must not make a loop that never ends. Raises ModelError."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_integers(name, value, f"{prefix}{key}.")
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        counts_layers = "layer" in key and not key.startswith(_NO_LAYERS) and not key.endswith(("_id", "_size"))
        most = MAX_LAYERS if counts_layers else MAX_INTEGER
        if abs(value) > most:
            raise ModelError(f"{name}: {prefix}{key}={shown(value)} is not allowed: an integer up to {most}")
