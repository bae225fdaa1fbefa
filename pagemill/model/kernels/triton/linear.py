"""Linear layers on device tensors, with the norm before them: one row by gemv.py, up to 16 on Hopper GPUs by
one_sum_early.py, a few where measured faster by skinny.py, many with a gate by gated_prompts.py on Hopper GPUs, else
cuBLAS.

Knows shapes, not layers.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.gpu_facts import is_hopper, num_processors
from pagemill.model.kernels.triton import choices, gated_prompts, launch
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.norm import rms_norm, rms_norm_of_parts
from pagemill.model.kernels.triton.norm_before import NormBefore
from pagemill.model.kernels.triton.one_sum_choices import MOST_EARLY, early_tiles
from pagemill.model.kernels.triton.one_sum_early import early_rows
from pagemill.model.kernels.triton.skinny import LAST_SUMS_ROWS, reads, skinny, skinny_add, skinny_parts, sums_at_once


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.linear: [T, K] times [N, K] -> [T, N], with a gate [T, N / 2]; sums in float32, rounded once to
    `out_dtype` (x's type) but by cuBLAS and one_sum_early.py with a gate, which round before it."""
    if len(x) == 1 and _takes(x, weight):
        choice = choices.gemv_choice(_shape(weight, gate), x.dtype)
        return gemv(x, weight, choice, bias=bias, gate=gate, out_dtype=out_dtype)
    if _comes_early(x, weight, gate):
        processors = num_processors(x.device)
        tiles = early_tiles(len(x), _shape(weight, gate), processors)
        return early_rows(x, weight, tiles, bias, gate, out_dtype or x.dtype, processors)
    few = _few(x, weight, gate)
    if few is not None:
        return skinny(x, weight, few, bias=bias, gate=gate, out_dtype=out_dtype)
    if gate is not None and bias is None and x.dtype == weight.dtype and gated_prompts.takes(x, weight):
        return gated_prompts.gated_many(x, weight, gate == "gelu_tanh")
    if gate is not None:
        return gated(_dense(x, weight, bias), gate == "gelu_tanh")
    if out_dtype is None or out_dtype == x.dtype:
        return _dense(x, weight, bias)
    return _wide(x, weight, bias, out_dtype)


def linear_norm(x: Tensor, before: Tensor, norm: tuple[Tensor, float], residual: Tensor | None = None) -> Tensor:
    """As reference.linear_norm: norm(x times `before` + residual), which takes the residual's place."""
    few = _few(x, before, None)
    if few is None or few.split_k == 1 or sums_at_once(len(x), few, len(before), x.device):
        return rms_norm(linear(x, before), *norm, residual)
    return rms_norm_of_parts(skinny_parts(x, before, few), *norm, x.dtype, residual)


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


def linear_norm_linear(
    x: Tensor,
    before: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.linear_norm_linear: the linear layer before the norm adds, the one after it scales, where both
    may."""
    first = _few(x, before, None)
    if first is None or first.split_k == 1 or residual is None:
        return norm_linear(linear(x, before), residual, norm, weight, bias, gate)
    second = _few(residual, weight, gate)
    rows = len(residual)
    if second is not None and residual.dtype == torch.bfloat16 and residual.is_contiguous():
        joined = rows <= LAST_SUMS_ROWS and sums_at_once(rows, first, len(before), weight.device)
        if joined and sums_at_once(rows, second, len(weight), weight.device):
            unscaled = skinny_add(x, before, first, residual, norm)
            return skinny(unscaled, weight, second, bias=bias, gate=gate), residual
    return linear(linear_norm(x, before, norm, residual), weight, bias, gate), residual


def _few(x: Tensor, weight: Tensor, gate: str | None) -> choices.SkinnyChoice | None:
    """How skinny.py multiplies them; None where it does not."""
    if not _takes(x, weight) or _comes_early(x, weight, gate):
        return None
    few = choices.skinny_choice(len(x), _shape(weight, gate), x.dtype)
    return few if few is not None and reads(x, weight) else None


def _comes_early(x: Tensor, weight: Tensor, gate: str | None) -> bool:
    """Whether one_sum_early.py multiplies them."""
    if not 1 < len(x) <= MOST_EARLY or _shape(weight, gate) in choices.SKINNY_ON_HOPPER:
        return False
    return _takes(x, weight) and is_hopper(x.device) and reads(x, weight)


def _takes(x: Tensor, weight: Tensor) -> bool:
    fits = x.dtype == weight.dtype and x.dtype in launch.DTYPES
    return fits and weight.is_contiguous() and x.stride(-1) == 1


def _shape(weight: Tensor, gate: str | None) -> choices.Shape:
    num_outputs, size = weight.shape
    return (num_outputs, size, False) if gate is None else (num_outputs // 2, size, True)


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not launch.launches():  # what is only compiled should not take the time of computing
        return x.new_empty(len(x), len(weight))
    return functional.linear(x, weight, bias)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """cuBLAS with the sums as they are; only float32 can be had so."""
    if out_dtype == torch.float32 and x.is_cuda:
        result = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        result = functional.linear(x, weight).to(out_dtype)
    return result if bias is None else result.add_(bias)
