"""The kernels that layers call: native ones on CPUs that have them, Triton's on GPUs, else plain torch.

Arguments are not checked. Knows nothing about layers; tensors of other devices and types go to plain torch, and so
does what is traced for a compiler, which fuses by itself.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.model.kernels import native, reference
from pagemill.model.kernels.dispatch import triton_kernels
from pagemill.model.kernels.kv_target import KVTarget

logger = get_logger(__name__)

_DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _for(x: Tensor) -> ModuleType:
    if torch.compiler.is_compiling():
        return reference
    if x.is_cuda:
        return device_kernels() if x.dtype in _DEVICE_DTYPES else reference
    use_native = x.is_cpu and x.dtype in native.DTYPES and native.library() is not None
    return native if use_native else reference


def device_kernels() -> ModuleType:
    """The kernels for GPUs; plain torch where Triton is not installed."""
    return triton_kernels("device") or reference


def compile_together(device: str, precompilation: Iterable[None], *, whole: bool) -> AbstractContextManager[None]:
    """On a device whose kernels are compiled at run time, the steps of `precompilation` come first: the kernels that
    they launch - those here, of attention and of experts - are not launched, so what they would write is undefined, but
    compiled all at once, while the body runs. Unless `whole`, there is but one step if all of it is on disk."""
    if not device.startswith("cuda") or device_kernels() is reference:
        return nullcontext()
    context: AbstractContextManager[None] = device_kernels().compile_together(precompilation, whole)
    return context


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension of [T, N] or [T, H, N]; with `residual`, of the sum, which it becomes."""
    result: Tensor = _for(x).rms_norm(x, weight, eps, residual)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """LayerNorm over the last dimension of [T, N] or [T, H, N]; with `residual`, of the sum, which it becomes. Plain
    torch on a GPU."""
    result: Tensor = _cpu_only(x).layer_norm(x, weight, bias, eps, residual)
    return result


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place; cos and sin [T, n], n <= D, second half as the first."""
    _for(x).rotate_(x, cos, sin)


def gated(x: Tensor, gate: str) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half; `gate` is silu, or gelu_tanh: GELU in its tanh form."""
    result: Tensor = _for(x).gated(x, gate == "gelu_tanh")
    return result


def activated(x: Tensor, activation: str) -> Tensor:
    """[T, I], contiguous -> act of each element; silu, gelu, gelu_tanh, relu, or relu2: the square of relu. Plain torch
    on a GPU."""
    result: Tensor = _cpu_only(x).activated(x, activation)
    return result


def soft_cap(logits: Tensor, limit: float) -> Tensor:
    """limit * tanh(x / limit) of [L, V]. Plain torch on a GPU, and in other types than float32."""
    if logits.dtype == torch.float32 and _cpu_only(logits) is native:
        # Of ranks that have unequal parts of a vocabulary, rows are slices of wider ones.
        return native.soft_cap(logits.contiguous(), limit)
    return torch.tanh(logits / limit) * limit


def any_gated(x: Tensor, activation: str) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half, by an activation that `activated` takes."""
    first, second = x.chunk(2, dim=-1)
    return activated(first.contiguous(), activation).mul_(second)


def sum_rows_(sums: Tensor, x: Tensor, starts: Tensor, slots: Tensor) -> None:
    """Add rows of x, [T, N], contiguous, to [S, N] float32, contiguous, in their order: those of request r, which are
    [starts[r], starts[r + 1]), to row slots[r], unless that is negative; no two have the same. starts [R + 1], from 0
    to T, and slots [R] are int64, on the host. Plain torch on a GPU."""
    _cpu_only(x).sum_rows_(sums, x, starts, slots)


def argmax(logits: Tensor) -> Tensor:
    """[L, V] -> [L] int64: the first index of the largest logit of each row; -1 where one is NaN, or the largest is
    infinite."""
    result: Tensor = _for(logits).argmax(logits)
    return result


def mask_(logits: Tensor, words: Tensor) -> None:
    """Set [L, V] float32 logits, rows of any stride, to minus infinity in place where a mask says so: [L, ceil(V / 32)]
    int32 on the same device, of which token t keeps its logit if bit t % 32 of word t // 32 is 1."""
    _for(logits).mask_(logits, words)


def samples_natively(logits: Tensor) -> bool:
    """Whether `sample` has a kernel for these logits: it is meant for those only."""
    return _for(logits) is native


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """[L, V] float32 logits to [L] int32 tokens, one draw each; see `reference.sample`."""
    result: Tensor = _for(logits).sample(logits, temperature, min_p, top_k, top_p, uniforms)
    return result


def choose(
    logits: Tensor, greedy: Tensor, settings: Sequence[Tensor], uniforms: Tensor, words: Tensor, rows: Tensor
) -> Tensor:
    """[L, V] float32 logits, which stay as they are, to [L] int32 tokens by their masks; see `reference.choose`. Where
    `samples_natively`."""
    result: Tensor = _for(logits).choose(logits, greedy, settings, uniforms, words, rows)
    return result


def samples_rows(logits: Tensor) -> bool:
    """Whether `sample_rows` has a kernel for these logits: it is meant for those only."""
    return logits.is_cuda and device_kernels() is not reference


def sample_rows(logits: Tensor, settings: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
    """[L, V] float32 on a GPU -> [L] int64: as worker/sampling does it, noise included, and nothing waits. -1 where
    `argmax` has none.

    settings [L, 7] int32: the bits of temperature, top_p, min_p (float32), top_k, greedy, seed (low, high); or of
    slots, with `slots` [L] int32. positions [L]: of the tokens to be sampled. Logits stay as they are.
    """
    result: Tensor = device_kernels().sample_rows(logits, settings, positions, slots)
    return result


def gather_pair(first: Tensor, second: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(first[indices], second[indices]) of two tables [P, N] of the same strides; indices [T] int64."""
    result: tuple[Tensor, Tensor] = _device_only(first).gather_pair(first, second, indices)
    return result


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, K] times a plain [N, K] -> [T, N] in `out_dtype` (x's type); with a gate (silu, gelu_tanh) of the first half
    [T, N / 2]. On a CPU plain torch: packed weights (linear.py) are the fast way there."""
    result: Tensor = _device_only(x).linear(x, weight, bias, gate, out_dtype)
    return result


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x + residual)), x + residual); `norm` is weight and eps. The sum may take the residual's place."""
    result: tuple[Tensor, Tensor] = _device_only(x).norm_linear(x, residual, norm, weight, bias, gate)
    return result


def linear_norm(x: Tensor, before: Tensor, norm: tuple[Tensor, float], residual: Tensor | None = None) -> Tensor:
    """norm(x times `before` + residual), `before` [N, K]; the sum takes the residual's place."""
    result: Tensor = _device_only(x).linear_norm(x, before, norm, residual)
    return result


def linear_norm_linear(
    x: Tensor,
    before: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of x times `before`, [N, K]."""
    result: tuple[Tensor, Tensor] = _device_only(x).linear_norm_linear(x, before, residual, norm, weight, bias, gate)
    return result


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` on a GPU, in which a row has the same bits whatever is computed beside it; see triton/invariant.py.
    Raises ConfigError where Triton is not installed."""
    kernels = triton_kernels("invariant")
    if kernels is None:
        raise ConfigError("deterministic=True needs the package triton on a GPU; leave out --deterministic")
    result: Tensor = kernels.linear(x, weight, bias, gate, out_dtype)
    return result


def split_heads(qkv: Tensor, num_heads: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D], views of it."""
    num_kv_heads = (qkv.shape[1] // head_size - num_heads) // 2
    heads = qkv.view(len(qkv), -1, head_size)
    query, key, value = heads.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key, value


def attention_inputs(
    qkv: Tensor,
    num_heads: int,
    head_size: int,
    rope: tuple[Tensor, Tensor],
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None = None,
    target: KVTarget | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """[T, (H + 2 * Hkv) * D] -> query [T, H, D], key and value [T, Hkv, D]: norms of the heads (weight and eps, of
    query and key), then rotary embedding by cos and sin [T, n]. With a `target` key and value are written there, and
    None. qkv may change."""
    kernels = _device_only(qkv)
    if kernels is not reference:
        result: tuple[Tensor, Tensor | None, Tensor | None] = kernels.attention_inputs(
            qkv, num_heads, head_size, rope, norms, target
        )
        return result
    query, key, value = split_heads(qkv, num_heads, head_size)
    if norms is not None:
        query, key = rms_norm(query, *norms[0]), rms_norm(key, *norms[1])
    rotate_(query, *rope)
    rotate_(key, *rope)
    if target is None:
        return query, key, value
    reference.write_kv(key, value, target)
    return query, None, None


def _device_only(x: Tensor) -> ModuleType:
    return _for(x) if x.is_cuda else reference


def _cpu_only(x: Tensor) -> ModuleType:
    return reference if x.is_cuda else _for(x)
