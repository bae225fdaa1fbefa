"""Gated activations: act(gate) * up on a stacked [T, 2 * I]."""

from pagemill.errors import ModelError

_BY_NAME = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def gate_of(name: str) -> str:
    """What kernels and weights call an activation (`ops.gated`, `QuantMethod.prepare`), by its name in config.json.
    Raises ModelError that lists the known names."""
    if name not in _BY_NAME:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
