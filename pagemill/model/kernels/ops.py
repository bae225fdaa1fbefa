"""The kernels that layers call: native where the library is there and knows the type, else plain torch.

Arguments are not checked. Knows nothing about layers; tensors of other devices and types go to plain torch.
"""

from types import ModuleType

from torch import Tensor

from pagemill.model.kernels import native, reference


def _for(x: Tensor) -> ModuleType:
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


def samples_natively(logits: Tensor) -> bool:
    """Whether `sample` has a kernel for these logits: it is meant for those only."""
    return _for(logits) is native


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """[L, V] float32 logits to [L] int32 tokens, one draw each; see `reference.sample`."""
    result: Tensor = _for(logits).sample(logits, temperature, min_p, top_k, top_p, uniforms)
    return result
