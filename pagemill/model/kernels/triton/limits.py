"""The largest magnitude of a row, and values within limits: NaN stays NaN, as in torch. By themselves Triton's maximum
and minimum take the other value, and a row with a NaN would become one of plain numbers."""

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(values, axis: tl.constexpr):
    """The largest magnitude along an axis, of float32."""
    return tl.reduce(tl.abs(values), axis, larger)


@triton.jit
def within(values, limit):
    """Values of at most `limit`, either way."""
    return tl.minimum(larger(values, -limit), limit, propagate_nan=tl.PropagateNan.ALL)
