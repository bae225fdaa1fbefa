"""`LayerPlan`: a whole forward pass as a list of operations that native code runs in one call.

Knows operations on numbered buffers; nothing about models. Everything is bfloat16 on a CPU; a cache may be int8.
"""

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagemill.model.kernels.linear import LinearStruct, PackedLinear
from pagemill.model.kernels.native import DTYPES, KV_DTYPES, Layer, loaded_library

NORM, LINEAR, PREPARE, ATTEND = 1, 2, 3, 4
NO_BUFFER = -1
MIN_CAPACITY = 64


class _Op(ctypes.Structure):
    """One operation, as `PmOp` in layer_plan.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "input", "out", "residual_in", "residual_out")),
        *((name, ctypes.c_void_p) for name in ("weight", "second_weight")),
        ("weight_dtype", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("linear", LinearStruct),
        ("layer", Layer),
        ("kv_cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("values_offset", "block_stride", "kv_dtype", "group")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("table_stride", "half", "table_dtype")),
    )


class _Run(ctypes.Structure):
    """One call, as `PmRun` in layer_plan.h."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("buffers", "widths", "batches", "wanted")),
        ("num_wanted", ctypes.c_int64),
    )


@dataclass(frozen=True)
class NormWeight:
    """An RMS norm: its weight and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class AttentionParts:
    """What an attention layer brings along. The cache is [2, num_blocks, Hkv, block_size, D], D + 4 of int8."""

    name: str
    """Under which its batch is found."""
    layer: Layer
    cache: Tensor
    cos: Tensor
    """[positions, D], as sin; of the type of the model, or float32."""
    sin: Tensor
    query_norm: NormWeight | None = None
    key_norm: NormWeight | None = None


@dataclass
class PlanBuilder:
    """Collects operations. Buffers are named by what they hold and reused from layer to layer: a buffer is written
    again only when everything that reads it lies before an operation that all threads wait for."""

    _ops: list[_Op] = field(default_factory=list)
    _buffers: dict[str, int] = field(default_factory=dict)
    _widths: list[int] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)
    _groups: list[str] = field(default_factory=list)
    _num_sums: int = 0

    def buffer(self, name: str, width: int) -> int:
        """The buffer of a name, `width` elements a token."""
        key = f"{name}.{width}"
        if key not in self._buffers:
            self._buffers[key] = len(self._widths)
            self._widths.append(width)
        return self._buffers[key]

    def norm(self, source: int, norm: NormWeight, out: str) -> int:
        """norm(source) -> out."""
        return self._norm(source, norm, out, NO_BUFFER, NO_BUFFER)

    def add_norm(self, source: int, residual: int, norm: NormWeight, out: str) -> tuple[int, int]:
        """(norm(source + residual) -> out, the sum)."""
        self._num_sums += 1
        total = self.buffer(f"sum{self._num_sums % 2}", len(norm.weight))
        return self._norm(source, norm, out, residual, total), total

    def linear(self, source: int, packed: PackedLinear, out: str) -> int:
        """A linear layer, its gate included."""
        target = self.buffer(out, packed.out_features)
        self._kept += packed.tensors
        self._add(LINEAR, source, target, linear=packed.struct)
        return target

    def attention(self, qkv: int, parts: AttentionParts, out: str) -> int:
        """Norms of query and key, rotary embedding, cache and attention, from query, key and value in one buffer."""
        layer, cache = parts.layer, parts.cache
        group = len(self._groups)
        self._groups.append(parts.name)
        self._kept += [cache, parts.cos, parts.sin]
        place = {
            "layer": layer,
            "kv_cache": cache.data_ptr(),
            "values_offset": cache.stride(0),
            "block_stride": cache.stride(1),
            "kv_dtype": KV_DTYPES[cache.dtype],
            "group": group,
        }
        norms = [norm for norm in (parts.query_norm, parts.key_norm) if norm is not None]
        self._kept += [norm.weight for norm in norms]
        self._add(
            PREPARE,
            qkv,
            NO_BUFFER,
            weight=parts.query_norm.weight.data_ptr() if parts.query_norm else None,
            second_weight=parts.key_norm.weight.data_ptr() if parts.key_norm else None,
            weight_dtype=DTYPES[norms[0].weight.dtype] if norms else 0,
            eps=norms[0].eps if norms else 0.0,
            cos=parts.cos.data_ptr(),
            sin=parts.sin.data_ptr(),
            table_stride=parts.cos.stride(0),
            half=parts.cos.shape[1] // 2,
            table_dtype=DTYPES[parts.cos.dtype],
            **place,
        )
        target = self.buffer(out, layer.num_heads * layer.head_size)
        self._add(ATTEND, qkv, target, **place)
        return target

    def finish(self, source: int, result: int) -> "LayerPlan":
        """The plan that reads `source` and leaves its result in `result`, which a norm wrote last."""
        return LayerPlan(self._ops, self._widths, source, result, self._groups, self._kept)

    def _norm(self, source: int, norm: NormWeight, out: str, residual: int, total: int) -> int:
        target = self.buffer(out, len(norm.weight))
        self._kept.append(norm.weight)
        self._add(
            NORM,
            source,
            target,
            residual_in=residual,
            residual_out=total,
            weight=norm.weight.data_ptr(),
            weight_dtype=DTYPES[norm.weight.dtype],
            eps=norm.eps,
        )
        return target

    def _add(self, kind: int, source: int, out: int, **values: object) -> None:
        values = {"residual_in": NO_BUFFER, "residual_out": NO_BUFFER} | values
        self._ops.append(_Op(kind=kind, input=source, out=out, **values))


class LayerPlan:
    """Runs a plan. Its buffers grow to the largest step; a result is valid until the next run."""

    def __init__(
        self, ops: list[_Op], widths: list[int], source: int, result: int, groups: list[str], kept: list[Tensor]
    ) -> None:
        self.groups = tuple(groups)
        """Attention layers, in the order in which `run` wants their batches."""
        self._ops = (_Op * len(ops))(*ops)
        self._widths = (ctypes.c_int64 * len(widths))(*widths)
        self._source, self._result = source, result
        self._kept = kept
        self._capacity = 0
        self._buffers: list[Tensor] = []
        self._addresses = (ctypes.c_void_p * len(widths))()
        self._batches = (ctypes.c_void_p * max(len(groups), 1))()

    def run(self, hidden: Tensor, positions: Tensor, batches: list[int], wanted: Tensor | None = None) -> Tensor:
        """[T, E] embedded tokens, [T] int64, the address of a native Batch per attention layer -> [T, E]. With
        `wanted`, [L] int64, ascending, only these rows of the result are sure to be computed.

        Raises MemoryError.
        """
        num_tokens = hidden.shape[0]
        self._reserve(num_tokens)
        # Nothing writes to the source, so it is read where it is.
        hidden = hidden.contiguous()
        self._addresses[self._source] = hidden.data_ptr()
        for index, address in enumerate(batches):
            self._batches[index] = address
        run = _Run(
            positions.data_ptr(),
            num_tokens,
            ctypes.addressof(self._addresses),
            ctypes.addressof(self._widths),
            ctypes.addressof(self._batches),
            None if wanted is None else wanted.data_ptr(),
            0 if wanted is None else len(wanted),
        )
        failed = loaded_library().run_plan(
            ctypes.addressof(self._ops), len(self._ops), ctypes.addressof(run), torch.get_num_threads()
        )
        if failed:
            raise MemoryError("no memory for the working space of a step")
        return self._buffers[self._result][:num_tokens]

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens <= self._capacity:
            return
        self._capacity = max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())
        self._buffers = [torch.empty(self._capacity, width, dtype=torch.bfloat16) for width in self._widths]
        self._addresses[:] = [buffer.data_ptr() for buffer in self._buffers]
