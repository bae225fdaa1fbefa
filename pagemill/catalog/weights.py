"""Weight formats, by name for --load-format: functions `(facts, dtype, seed, select, place) -> Iterator[(name, part)]`
(docs/loading.md)."""

import inspect
from typing import Any

from pagemill.catalog.registry import Registry, load_path
from pagemill.errors import ConfigError

AUTO = "auto"
DUMMY = "dummy"
IN_FILES = ("gguf", "safetensors")
"""What `auto` finds."""
SHARDED_STATE = "sharded_state"
_ELSEWHERE = {
    **dict.fromkeys(("pt", "npcache"), "pickles are never loaded: convert the checkpoint to safetensors"),
    **dict.fromkeys(
        ("hf", "fastsafetensors", "runai_streamer", "runai_streamer_sharded", "tensorizer", "instanttensor", "mistral"),
        "safetensors of a folder are mapped and read side by side with the work on them: use auto, or a plug-in",
    ),
    "bitsandbytes": "the checkpoint says how it is quantized: use auto",
}
"""Formats of vLLM, and what to do instead."""
_ARGUMENTS = ("facts", "dtype", "seed", "select", "place")

WEIGHTS: Registry[Any] = Registry(
    "weights format",
    {
        "dummy": "pagemill.model.loading.sources.dummy:iterate",
        "gguf": "pagemill.model.loading.sources.gguf:iterate",
        "safetensors": "pagemill.model.loading.sources.safetensors:iterate",
        "sharded_state": "pagemill.model.loading.sources.sharded_state:iterate",
    },
)


def check_load_format(name: str) -> None:
    """Raise ConfigError that lists the known names, if `--load-format` can be none of this name. Imports nothing."""
    if name == AUTO or name in WEIGHTS or ":" in name:
        return
    why = f" ({_ELSEWHERE[name]})" if name in _ELSEWHERE else ""
    raise ConfigError(
        f"load_format={name!r} is none of {', '.join([AUTO, *sorted(WEIGHTS)])}, nor module:function{why}"
    )


def weights_source(name: str) -> Any:
    """The function of a format, or that which module:function names. Raises ConfigError for one that cannot be called
    as such functions are."""
    if ":" not in name:
        return WEIGHTS.resolve(name)
    function = load_path("weights format", name)
    try:
        inspect.signature(function).bind(*_ARGUMENTS)
    except TypeError as error:
        raise ConfigError(
            f"load_format={name!r} is no function of {', '.join(_ARGUMENTS)} that yields tensors: {error}"
        ) from error
    except ValueError:  # a function of C that does not say its arguments
        pass
    return function
