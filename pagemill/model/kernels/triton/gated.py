"""Gated activations in one pass, and the activations themselves for other kernels. Knows no layer."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.limits import within

_BLOCK = 1024


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form, of float32."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(tl.maximum(2.0 * inner, -80.0))
    return gate * tl.sigmoid(tl.maximum(gate, -80.0))


@triton.jit
def gate_times(gate, up, GELU: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """What an expert does with its gate and up (`kernels.moe.ExpertForm`), of float32."""
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = within(up, LIMIT) + 1.0
        result = gate * tl.sigmoid(tl.maximum(gate * ALPHA, -80.0)) * up
    else:
        result = activate(gate, GELU) * up
    return result


@triton.jit
def _gated(out, x, x_stride, N, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x + row * x_stride + cols, cols < N, 0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + N + cols, cols < N, 0.0).to(tl.float32)
    activated = activate(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + cols, (activated * up).to(out.dtype.element_ty), cols < N)


def gate_options(form: ExpertForm) -> dict[str, Any]:
    """The constants of `gate_times`."""
    alpha, limit = form.clamp or (0.0, 0.0)
    return {"GELU": form.gelu, "CLAMPED": form.clamp is not None, "ALPHA": alpha, "LIMIT": limit}


def gated(x: Tensor, gelu: bool) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half, the activation rounded before the product."""
    num_rows = x.shape[0]
    size = x.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    block = min(_BLOCK, launch.power_of_two(size))
    launch.on(_gated, (num_rows, triton.cdiv(size, block)))(
        out, x, x.stride(0), size, GELU=gelu, BLOCK=block, PDL=launch.dependent(), **launch.options()
    )
    return out
