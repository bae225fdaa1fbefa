"""Gated activations: act(gate) * up on a stacked [T, 2 * I]."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from pagemill.errors import ModelError


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: gelu(gate), in its tanh form, * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


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
