"""Fields of a config.json that some families call by names of their own, by the usual ones. Knows no values."""

from collections.abc import Mapping
from typing import Any, Final

USUAL: Final = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
}
"""Another name -> the usual one."""
SIZES: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    "max_position_embeddings",
)
"""What others read of a config, whoever computes the model."""
DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "mamba": {"max_position_embeddings": 1 << 20, "num_attention_heads": 1},
    "mamba2": {"max_position_embeddings": 1 << 20, "num_attention_heads": 1},
    "bloom": {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
    "falcon": {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
    "RefinedWeb": {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
    "RefinedWebModel": {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
}
"""`model_type` -> what its files leave out. Models of states alone have no positions: their length is bounded by what
anybody asks for."""


def with_common_names(config: Mapping[str, Any], made: object = None) -> dict[str, Any]:
    """A copy that has, beside its own fields, the usual names of those that it calls otherwise. `made`: an object that
    somebody made of the config, whose attributes of these names give sizes that it lacks."""
    named = dict(config)
    for name, usual in USUAL.items():
        if config.get(name) is not None and named.get(usual) is None:
            named[usual] = config[name]
    for name, value in DEFAULTS.get(str(config.get("model_type")), {}).items():
        if named.get(name) is None:
            named[name] = value
    for size in SIZES:
        value = getattr(made, size, None)
        if isinstance(value, int) and named.get(size) is None:
            named[size] = value
    return named
