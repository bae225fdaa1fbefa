"""The kernels that layers call: native where the library is there and knows the type, else plain torch.

Arguments are not checked. Knows nothing about layers; tensors of other devices and types go to plain torch, and so
does what is traced for a compiler, which fuses by itself.
"""

from types import ModuleType

import torch
from torch import Tensor

from pagemill.model.kernels import native, reference


def _for(x: Tensor) -> ModuleType:
    if torch.compiler.is_compiling():
        return reference
    use_native = x.is_cpu and x.dtype in native.DTYPES and native.library() is not None
    return native if use_native else reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension of [T, N] or [T, H, N]; with `residual`, of the sum, which it becomes."""
    result: Tensor = _for(x).rms_norm(x, weight, eps, residual)
    return result


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place; cos and sin [T, n], n <= D, second half as the first."""
    _for(x).rotate_(x, cos, sin)


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu(gate) * up."""
    result: Tensor = _for(x).gated(x, False)
    return result


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: gelu(gate), in its tanh form, * up."""
    result: Tensor = _for(x).gated(x, True)
    return result


def argmax(logits: Tensor) -> Tensor:
    """[L, V] -> [L] int64: the first index of the largest logit of each row; of the first NaN where there is one."""
    result: Tensor = _for(logits).argmax(logits)
    return result
