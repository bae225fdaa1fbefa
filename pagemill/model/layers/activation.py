"""Gated activations: act(gate) * up on a stacked [T, 2 * I]."""

from collections.abc import Callable

from torch import Tensor

from pagemill.errors import ModelError
from pagemill.model.kernels.ops import gelu_tanh_mul, silu_mul

_NATIVE = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}


def gated(name: str) -> Callable[[Tensor], Tensor]:
    """The gated form of an activation by its name in config.json. Raises ModelError that lists the known names."""
    if name not in _BY_NAME:
        raise ModelError(f"activation {name!r} is not supported; known: {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def gate_of(name: str) -> str | None:
    """What a linear layer that includes the activation calls it (`QuantMethod.prepare`); None: none does."""
    return _NATIVE.get(name)
