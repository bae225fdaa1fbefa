"""What the kernels compute, in plain torch: the definition that they are tested against, and the way without them."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32. `residual` becomes x + residual first.

    A float32 weight beside another type of x is multiplied before rounding (Gemma), else after.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * weight).to(x.dtype)
    return wide.to(x.dtype) * weight


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place, halves as pairs; cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    x.copy_(x * cos.unsqueeze(1) + turned)


def gated(x: Tensor, gelu: bool) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half; gelu in its tanh form, else SiLU."""
    gate, up = x.chunk(2, dim=-1)
    activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    return activated.mul_(up)
