"""The compiled kernels as Python functions on tensors. Arguments are not checked here: callers are layers of ours.

`library()` is None where the kernels cannot be built or are switched off; reference.py then does the same in torch.
"""

import ctypes
import functools

import torch
from torch import Tensor

from pagemill import envs
from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.model.kernels.build import build

logger = get_logger(__name__)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "pm_paged_attention": [_POINTER] * 6 + [_INT] * 9 + [_FLOAT] * 2 + [_INT] * 2,
    "pm_write_kv": [_POINTER] * 4 + [_INT] * 8,
    "pm_rms_norm": [_POINTER] * 4 + [_INT] * 4 + [_FLOAT] + [_INT] * 3,
    "pm_rotate": [_POINTER] * 3 + [_INT] * 6,
    "pm_gated": [_POINTER] * 2 + [_INT] * 5,
}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types that the kernels compute."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library. It uses torch's OpenMP runtime, which is in the process already, so there is one pool."""
    if not envs.native_kernels():
        return None
    path = build()
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("the CPU kernels cannot be loaded, plain torch runs instead: %s", error)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = None
    return loaded


def loaded_library() -> ctypes.CDLL:
    """The library, where it is known to be there."""
    found = library()
    if found is None:
        raise ConfigError("the CPU kernels are not available here")
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """[..., N] -> [..., N], contiguous. `residual`, of x's shape and contiguous, becomes x + residual first.

    x may be a slice of a wider tensor, as long as its last dimensions are contiguous within a row. A float32 weight
    beside another type of x means that the product is rounded once (Gemma).
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    cols = x.shape[-1]
    inner, stride = (1, x.stride(0)) if x.dim() == 2 else (x.shape[1], x.stride(0))
    loaded_library().pm_rms_norm(
        out.data_ptr(), x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(),
        out.numel() // cols, cols, inner, stride, eps, weight.dtype == x.dtype, DTYPES[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place; cos and sin [T, D], contiguous."""
    num_tokens, num_heads, head_size = x.shape
    loaded_library().pm_rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, num_heads, head_size, x.stride(0),
        DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip


def gated(x: Tensor, gelu: bool) -> Tensor:
    """[T, 2 * I] contiguous -> [T, I]."""
    rows, cols = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, cols), dtype=x.dtype)
    loaded_library().pm_gated(out.data_ptr(), x.data_ptr(), rows, cols, gelu, DTYPES[x.dtype], torch.get_num_threads())
    return out
