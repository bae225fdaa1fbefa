"""Linear layers on device tensors: one row by gemv.py, a few where measured faster by skinny.py, else cuBLAS.

Knows shapes, not layers.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.triton import choices, launch
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.norm import rms_norm
from pagemill.model.kernels.triton.norm_before import NormBefore
from pagemill.model.kernels.triton.skinny import reads, skinny


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.linear: [T, K] times [N, K] -> [T, N], with a gate [T, N / 2]; sums in float32, rounded once to
    `out_dtype` (x's type) but by cuBLAS and a gate, which round before it."""
    num_rows = len(x)
    if _takes(x, weight):
        shape = _shape(weight, gate)
        if num_rows == 1:
            choice = choices.gemv_choice(shape, x.dtype)
            return gemv(x, weight, choice, bias=bias, gate=gate, out_dtype=out_dtype)
        few = choices.skinny_choice(num_rows, shape, x.dtype)
        if few is not None and reads(x, weight):
            return skinny(x, weight, few, bias=bias, gate=gate, out_dtype=out_dtype)
    if gate is not None:
        return gated(functional.linear(x, weight, bias), gate == "gelu_tanh")
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, weight, bias)
    return _wide(x, weight, bias, out_dtype)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.norm_linear: (linear(norm(x + residual)), x + residual)."""
    norm_weight, eps = norm
    shape = _shape(weight, gate)
    if len(x) == 1 and shape in choices.FUSED_NORM_MEASURED and _takes(x, weight):
        before = NormBefore(norm_weight, eps, residual, torch.empty_like(x))
        choice = choices.gemv_choice(shape, x.dtype)
        return gemv(x, weight, choice, bias=bias, gate=gate, norm=before), before.summed
    normed = rms_norm(x, norm_weight, eps, residual)
    return linear(normed, weight, bias, gate), x if residual is None else residual


def _takes(x: Tensor, weight: Tensor) -> bool:
    fits = x.dtype == weight.dtype and x.dtype in launch.DTYPES
    return fits and weight.is_contiguous() and x.stride(-1) == 1


def _shape(weight: Tensor, gate: str | None) -> choices.Shape:
    num_outputs, size = weight.shape
    return (num_outputs, size, False) if gate is None else (num_outputs // 2, size, True)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """cuBLAS with the sums as they are; only float32 can be had so."""
    if out_dtype == torch.float32 and x.is_cuda:
        result = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        result = functional.linear(x, weight).to(out_dtype)
    return result if bias is None else result.add_(bias)
