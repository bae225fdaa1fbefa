"""Activations by their names in config.json: gated ones, act(gate) * up on a stacked [T, 2 * I], and plain ones."""

from collections.abc import Mapping

from pagemill.errors import ModelError

_GATED = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_PLAIN = _GATED | {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}
GATES = frozenset(_GATED.values())
"""Those that kernels and weights know as gates."""


def gate_of(name: str) -> str:
    """What kernels and weights call an activation (`ops.gated`, `QuantMethod.prepare`), by its name in config.json.
    Raises ModelError that lists the known names."""
    return _known(name, _GATED, "gated activation")


def activation_of(name: str) -> str:
    """What `ops.activated` calls an activation without a gate, by its name in config.json. Raises ModelError that lists
    the known names."""
    return _known(name, _PLAIN, "activation")


def _known(name: str, names: Mapping[str, str], what: str) -> str:
    if name not in names:
        raise ModelError(f"{what} {name!r} is not supported; known: {', '.join(sorted(names))}")
    return names[name]
