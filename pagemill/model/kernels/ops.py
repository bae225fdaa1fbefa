"""The kernels that layers call: native where the library is there and knows the type, else plain torch."""

from types import ModuleType

import torch
from torch import Tensor

from pagemill.model.kernels import native, reference


def _for(dtype: torch.dtype, device: torch.device) -> ModuleType:
    use_native = device.type == "cpu" and dtype in native.DTYPES and native.library() is not None
    return native if use_native else reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension; with `residual`, of x + residual, which residual becomes."""
    result: Tensor = _for(x.dtype, x.device).rms_norm(x, weight, eps, residual)
    return result


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place; cos and sin [T, D]."""
    _for(x.dtype, x.device).rotate_(x, cos, sin)


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up."""
    result: Tensor = _for(x.dtype, x.device).gated(x, False)
    return result


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: gelu(gate), in its tanh form, * up."""
    result: Tensor = _for(x.dtype, x.device).gated(x, True)
    return result
