"""Activations inside other kernels, in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form; tanh(a) = 2 * sigmoid(2 a) - 1."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    else:
        return x / (1.0 + tl.exp(-x))
