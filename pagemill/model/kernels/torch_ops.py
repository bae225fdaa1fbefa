"""The kernels as operations of torch, `torch.ops.pagemill.*`: for torch.compile, torch.export, and code of others.

Knows tensors; nothing about layers. Importing it registers them, which takes milliseconds: layers import it only while
they are traced, and otherwise call the kernels themselves. Unlike those, operations check what they are given: a
ValueError names what does not fit. op_reference.py has the same in plain torch, which runs where there are no kernels.
"""

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from pagemill.model.kernels import native, op_checks, op_reference, ops
from pagemill.model.kernels.linear import PackedLinear, PanelForm
from pagemill.model.kernels.linear import linear as native_linear
from pagemill.model.kernels.linear import weight_rows as native_rows
from pagemill.model.kernels.linear_reference import FORMAT_NAMES
from pagemill.model.kernels.mirrors import Batch, Layer, LinearStruct
from pagemill.model.kernels.op_reference import GATES
from pagemill.model.kernels.pack_linear import NO_GATE

FORMATS = {name: number for number, name in FORMAT_NAMES.items()}
"""Name of what panels hold -> PmFormat."""
GATE_NAMES = {number: name for name, number in GATES.items()}


@torch.library.custom_op("pagemill::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of [T, N] or [T, H, N]; a float32 weight beside another type of x
    is multiplied before rounding, else after."""
    op_checks.check_norm(x, weight)
    return ops.rms_norm(_in_rows(x), weight.contiguous(), eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    op_checks.check_norm(x, weight)
    return x.new_empty(x.shape)


@torch.library.custom_op("pagemill::add_rms_norm", mutates_args=("residual",))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x + residual; the sum takes the residual's place."""
    op_checks.check_norm(x, weight, residual)
    total = residual.contiguous()
    out = ops.rms_norm(_in_rows(x), weight.contiguous(), eps, total)
    if total.data_ptr() != residual.data_ptr():
        residual.copy_(total)
    return out


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    op_checks.check_norm(x, weight, residual)
    return x.new_empty(x.shape)


@torch.library.custom_op("pagemill::rotate_", mutates_args=("x",))
def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, H, D] in place, halves as pairs; cos and sin [T, n], n <= D: elements beyond n stay."""
    op_checks.check_rotation(x, cos, sin)
    turned = _in_rows(x)
    ops.rotate_(turned, cos.contiguous(), sin.contiguous())
    if turned.data_ptr() != x.data_ptr():
        x.copy_(turned)


@rotate_.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    op_checks.check_rotation(x, cos, sin)


@torch.library.custom_op("pagemill::gated_activation", mutates_args=())
def gated_activation(x: Tensor, activation: str) -> Tensor:
    """[T, 2 * I] -> [T, I]: act(first half) * second half; `activation` is silu or gelu_tanh."""
    op_checks.gated_shape(x, activation)
    return ops.gated(_in_rows(x), activation)


@gated_activation.register_fake
def _(x: Tensor, activation: str) -> Tensor:
    return x.new_empty(op_checks.gated_shape(x, activation))


@torch.library.custom_op("pagemill::argmax", mutates_args=())
def argmax(logits: Tensor) -> Tensor:
    """[L, V] -> [L] int64: the first index of the largest, or of a NaN."""
    op_checks.check_logits(logits)
    return ops.argmax(_in_rows(logits))


@argmax.register_fake
def _(logits: Tensor) -> Tensor:
    op_checks.check_logits(logits)
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@torch.library.custom_op("pagemill::sample", mutates_args=(), device_types="cpu")
def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor
) -> Tensor:
    """[L, V] float32 and, for each row, temperature, min_p, top_p (float32), top_k (int32; 0: no limit) and a number in
    (0, 1) (float64) -> [L] int32: one draw each."""
    settings = temperature, min_p, top_k, top_p, uniforms
    op_checks.check_draws(logits, *settings)
    return ops.sample(_in_rows(logits), *(values.contiguous() for values in settings))


@sample.register_fake
def _(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    op_checks.check_draws(logits, temperature, min_p, top_k, top_p, uniforms)
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


@torch.library.custom_op("pagemill::linear", mutates_args=(), device_types="cpu")
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    num_outputs: int,
    num_inputs: int,
    gate: str = "",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[M, K] bfloat16 -> [M, N]; with a gate (silu, gelu_tanh) of the first half of the outputs, [M, N / 2].

    `weight` is panels of `format` (BF16, Q8_0, Q4_0, Q4_1), as `pack_bf16` and `pack_blocks` make them; integers are
    multiplied with inputs of 8 bits. `linear_arguments` gives the arguments after x. bias: [N] float32.
    """
    _check_linear(x, weight, bias, (format, num_outputs, num_inputs, gate, out_dtype))
    if native.library() is None:
        return op_reference.linear(x, weight, bias, format, num_outputs, num_inputs, gate, out_dtype)
    packed = _packed(weight, bias, (format, num_outputs, num_inputs, gate))
    return native_linear(_in_rows(x), packed, out_dtype)


@linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    num_outputs: int,
    num_inputs: int,
    gate: str = "",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    _check_linear(x, weight, bias, (format, num_outputs, num_inputs, gate, out_dtype))
    return x.new_empty((x.shape[0], num_outputs if gate == "" else num_outputs // 2), dtype=out_dtype)


@torch.library.custom_op("pagemill::linear_rows", mutates_args=(), device_types="cpu")
def linear_rows(indices: Tensor, weight: Tensor, format: str, num_outputs: int, num_inputs: int) -> Tensor:
    """[T] int64 -> [T, K] bfloat16: rows of a weight in panels, without a gate. Raises IndexError for a row that it
    does not have."""
    _check_rows(indices, weight, format, (num_outputs, num_inputs))
    if native.library() is None:
        return op_reference.linear_rows(indices, weight, format, num_outputs, num_inputs)
    return native_rows(indices, _packed(weight, None, (format, num_outputs, num_inputs, "")))


@linear_rows.register_fake
def _(indices: Tensor, weight: Tensor, format: str, num_outputs: int, num_inputs: int) -> Tensor:
    _check_rows(indices, weight, format, (num_outputs, num_inputs))
    return indices.new_empty((indices.shape[0], num_inputs), dtype=torch.bfloat16)


@torch.library.custom_op("pagemill::paged_attention", mutates_args=("kv_cache",), device_types="cpu")
def paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    step: Sequence[Tensor],
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Write key and value to their slots, when given, then attend: [T, H, D] -> [T, H, D].

    kv_cache [2, num_blocks, Hkv, block_size, D], of int8 D + 4, laid out as `reference.packed_cache` makes it of rows.
    `step` is query_start [R + 1], seq_lens [R], block_table [R, most blocks], all int32, and slot_mapping [T] int64.
    """
    op_checks.check_attention(query, key, value, kv_cache, step)
    writes = key is not None
    block_size = kv_cache.shape[3]
    op_checks.check_step(step, len(query), kv_cache.shape[1], block_size, writes)
    if native.library() is None or query.dtype not in native.DTYPES:
        args = query, key, value, kv_cache, step, scale
        return op_reference.paged_attention(*args, window, chunk_size, soft_cap)
    if key is not None and value is not None:
        key, value = _in_rows(key), _in_rows(value)
    kept = [tensor.contiguous() for tensor in step]
    addresses = (tensor.data_ptr() for tensor in kept)
    batch = Batch(*addresses, len(kept[1]), len(query), kept[2].shape[1], block_size)
    heads = query.shape[1], kv_cache.shape[2], query.shape[2]
    layer = Layer(*heads, window or 0, chunk_size or 0, scale, soft_cap or 0.0)
    return native.attention(_in_rows(query), key, value, kv_cache, addressof(batch), addressof(layer))


@paged_attention.register_fake
def _(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    step: Sequence[Tensor],
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    op_checks.check_attention(query, key, value, kv_cache, step)
    return query.new_empty(query.shape)


OPERATIONS = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rotate_": rotate_,
    "gated_activation": gated_activation,
    "argmax": argmax,
    "sample": sample,
    "linear": linear,
    "linear_rows": linear_rows,
    "paged_attention": paged_attention,
}
"""Every operation by its name; `op_reference.REFERENCES` has the same names."""


def linear_arguments(packed: PackedLinear) -> tuple[Tensor, Tensor | None, str, int, int, str]:
    """What `linear` takes after x: weight, bias, format, num_outputs, num_inputs, gate."""
    struct = packed.struct
    bias = packed.tensors[1] if len(packed.tensors) > 1 else None
    return packed.tensors[0], bias, FORMAT_NAMES[struct.format], struct.rows, struct.cols, GATE_NAMES[struct.gate]


def traced_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: PanelForm, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`linear` of a layer's weight, for a compiler."""
    sizes = FORMAT_NAMES[form.format], form.rows, form.cols
    result: Tensor = linear(x, weight, None if bias is None else bias.float(), *sizes, GATE_NAMES[form.gate], out_dtype)
    return result


def traced_rows(indices: Tensor, weight: Tensor, form: PanelForm) -> Tensor:
    """`linear_rows` of a layer's weight, for a compiler."""
    result: Tensor = linear_rows(indices, weight, FORMAT_NAMES[form.format], form.rows, form.cols)
    return result


def _in_rows(x: Tensor) -> Tensor:
    """x itself where its rows are contiguous, as the kernels want them, however far apart; else a copy."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            return x.contiguous()
        inner *= size
    return x


def _packed(weight: Tensor, bias: Tensor | None, form: tuple[str, int, int, str]) -> PackedLinear:
    name, rows, cols, gate = form
    bias = None if bias is None else bias.contiguous()
    address = None if bias is None else bias.data_ptr()
    struct = LinearStruct(weight.data_ptr(), address, FORMATS[name], rows, cols, GATES[gate])
    tensors = (weight,) if bias is None else (weight, bias)
    return PackedLinear(struct, tensors, rows if GATES[gate] == NO_GATE else rows // 2)


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, form: tuple[Any, ...]) -> None:
    name, rows, cols, gate, out_dtype = form
    op_checks.check(gate in GATES, f"gate is {gate!r}, expected one of {', '.join(map(repr, GATES))}")
    op_checks.check(bias is None or not gate, "bias: expected none with a gate")
    op_checks.check_panels(weight, name, (rows, cols), GATES[gate])
    op_checks.check_linear_input(x, bias, (rows, cols), out_dtype)


def _check_rows(indices: Tensor, weight: Tensor, name: str, sizes: tuple[int, int]) -> None:
    fits = indices.dim() == 1 and indices.dtype == torch.int64
    op_checks.check(fits, f"indices are {op_checks.form(indices)}, expected int64 [T]")
    op_checks.check_panels(weight, name, sizes)
