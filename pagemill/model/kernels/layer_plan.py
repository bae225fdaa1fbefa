"""`LayerPlan`: a whole forward pass as a list of operations that native code runs in one call.

Knows operations on numbered buffers; nothing about models. Everything is bfloat16 on a CPU; a cache may be int8.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import Op, Run
from pagemill.model.kernels.native import DTYPES, KV_DTYPES, loaded_library
from pagemill.model.kernels.native_experts import NativeExperts, NativeRouting
from pagemill.model.kernels.native_heads import HeadParts
from pagemill.model.kernels.plan_parts import (
    AttentionParts,
    LatentParts,
    NormWeight,
    keys_as_values,
    weight_for_heads,
)
from pagemill.model.kernels.streams import StreamFunction

NORM = 1
LINEAR = 2
PREPARE = 3
ATTEND = 4
CHOOSE = 5
ADD = 6
LOOK_UP = 7
SCALE = 8
EMBED = 9
GATE = 10
MULTIPLY = 11
NORM_PARTS = 12
SOFT_CAP = 14
PREPARE_LATENT = 17
PLAN_GATES = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
"""As PmGate in cpu/kernels.h."""
NO_BUFFER = -1
MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What native code looks up for tokens: rows of an embedding."""

    embedding: PackedLinear | Tensor
    """[V, n]; a tensor is bfloat16."""
    scale: float
    known: int
    """Tokens from here on have the row of token 0."""


class LookUp(Protocol):
    """[T] int64 token ids -> [T, n] bfloat16, contiguous."""

    @property
    def __call__(self) -> Callable[[Tensor], Tensor]:
        """What gives the rows of token ids."""

    def native(self) -> TokenTable | None:
        """The same as native code takes it; None when there is no such form."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a plan reads that looks embeddings up itself."""

    ids: Tensor
    """[T] int64, each with a row in the plan's table."""
    types: Tensor | None
    """[T] int64; None: all are 0."""


@dataclass
class PlanBuilder:
    """Collects operations. Buffers are named, and used again: a buffer is written again only when everything that
    reads it lies before an operation that all threads wait for, which is any but a norm. Of a few rows, each thread
    keeps what the last norm gave for itself: it is read before the next norm, and its buffer is for norms only."""

    _ops: list[Op] = field(default_factory=list)
    _buffers: dict[str, int] = field(default_factory=dict)
    _widths: list[int] = field(default_factory=list)
    _floats: set[int] = field(default_factory=set)
    """Buffers of float32."""
    _kept: list[object] = field(default_factory=list)
    _groups: list[str] = field(default_factory=list)
    _of_step: list[int] = field(default_factory=list)
    """Operations whose keys and values are the step's."""

    def buffer(self, name: str, width: int) -> int:
        """The buffer of a name, `width` elements a token."""
        key = f"{name}.{width}"
        if key not in self._buffers:
            self._buffers[key] = len(self._widths)
            self._widths.append(width)
        return self._buffers[key]

    def width(self, buffer: int) -> int:
        """Elements of a buffer for each token."""
        return self._widths[buffer]

    def norm(self, source: int, norm: NormWeight, out: str, *, stored: bool = False) -> int:
        """norm(source) -> out. `stored`: it is read after the next norm too, when threads have waited for each
        other."""
        return self._norm(source, norm, out, NO_BUFFER, NO_BUFFER, stored=stored)

    def add_norm(
        self, source: int, residual: int, norm: NormWeight, out: str, total: str, *, stored: bool = False
    ) -> tuple[int, int]:
        """(norm(source + residual) -> out, source + residual -> total). `stored` as for `norm`."""
        sums = self.buffer(total, len(norm.weight))
        return self._norm(source, norm, out, residual, sums, stored=stored), sums

    def linear(self, source: int, packed: PackedLinear, out: str, width: int | None = None) -> int:
        """A linear layer, its gate included, to the first elements of a buffer that may be wider."""
        target = self.buffer(out, width or packed.out_features)
        self._linear(source, packed, target, torch.bfloat16)
        return target

    def attention(self, qkv: int, parts: AttentionParts, out: str) -> int:
        """Norms of query and key, rotary embedding, cache and attention, from query, key and value in one buffer."""
        layer = parts.layer
        cache = parts.cache
        group = len(self._groups)
        self._groups.append(parts.name)
        self._kept += parts.rope or ()
        place: dict[str, Any] = {"layer": layer, "group": group}
        if cache is None:
            place["kv_dtype"] = DTYPES[torch.bfloat16]
            self._of_step += [len(self._ops), len(self._ops) + 1]
        else:
            self._kept.append(cache)
            place |= _cache_place(cache)
        norms = [norm for norm in parts.norms if norm is not None]
        weights = [None if norm is None else weight_for_heads(norm) for norm in parts.norms]
        first, second, third = (None if weight is None else weight.data_ptr() for weight in weights)
        growth, growth_step = parts.growth or (None, 0)
        self._kept += [*weights, growth]
        self._add(
            PREPARE,
            qkv,
            NO_BUFFER,
            weight=first,
            second_weight=second,
            third_weight=third,
            key_is_value=parts.key_is_value,
            whole_norms=parts.whole_norms,
            shared=parts.shared,
            centers=bool(norms) and norms[0].centers,
            weight_dtype=DTYPES[norms[0].weight.dtype] if norms else 0,
            eps=norms[0].eps if norms else 0.0,
            norms_last=parts.norms_last,
            growth=None if growth is None else growth.data_ptr(),
            growth_step=growth_step,
            **_tables(parts.rope),
            **place,
        )
        target = self.buffer(out, layer.num_heads * layer.head_size)
        self._add(ATTEND, qkv, target, **place)
        return target

    def latent_attention(self, query: int, kept: int, parts: LatentParts, out: str) -> int:
        """The norm of what is latent, rotary embedding, cache and attention, from queries [rotary + plain] of each head
        in one buffer, and what is kept, [rotary + latent], in another -> values of all heads."""
        layer = parts.layer
        heads = layer.num_heads
        size = layer.head_size
        rotary = parts.rope[0].shape[1]
        value = parts.expand.layers[0].out_features
        cache = keys_as_values(parts.cache)
        place: dict[str, Any] = {"layer": layer, "group": len(self._groups), **_cache_place(cache)}
        self._groups.append(parts.name)
        absorb = parts.absorb.placed(HeadParts(self._widths[query] // heads, rotary), HeadParts(size, rotary))
        expand = parts.expand.placed(HeadParts(size, rotary), HeadParts(value, 0))
        self._kept += [*parts.rope, cache, parts.norm.weight, absorb, expand]
        absorbed = self.buffer("absorbed", (heads + 1) * size)
        attended = self.buffer("attended", heads * size)
        target = self.buffer(out, heads * value)
        self._add(
            PREPARE_LATENT,
            query,
            absorbed,
            residual_in=kept,
            columns=rotary,
            weight=parts.norm.weight.data_ptr(),
            weight_dtype=DTYPES[parts.norm.weight.dtype],
            eps=parts.norm.eps,
            **_tables(parts.rope),
            **place,
        )
        self._ops.append(absorb.operation(query, absorbed))
        self._add(ATTEND, absorbed, attended, **place)
        self._ops.append(expand.operation(attended, target))
        return target

    def add(self, first: int, second: int, out: str) -> int:
        """first + second -> out. One of them may be what the last norm gave."""
        target = self.buffer(out, self._widths[first])
        self._add(ADD, first, target, residual_in=second)
        return target

    def scale(self, source: int, factor: float, out: str) -> int:
        """source * factor -> out. The source may be what the last norm gave."""
        target = self.buffer(out, self._widths[source])
        self._add(SCALE, source, target, out_dtype=DTYPES[torch.bfloat16], factor=factor)
        return target

    def multiply(self, source: int, other: int, column: int, out: str) -> int:
        """source * elements of another buffer from `column` on -> out. Neither is what a norm gave."""
        target = self.buffer(out, self._widths[source])
        self._add(MULTIPLY, source, target, residual_in=other, columns=column)
        return target

    def norm_parts(self, source: int, norm: NormWeight, out: str) -> int:
        """The RMS norm of each part of a buffer that is as long as the weight -> out, which is no norm's buffer."""
        target = self.buffer(out, self._widths[source])
        self._kept.append(norm.weight)
        details = {"weight": norm.weight.data_ptr(), "weight_dtype": DTYPES[norm.weight.dtype], "eps": norm.eps}
        self._add(NORM_PARTS, source, target, columns=len(norm.weight), **details)
        return target

    def streams(self, sources: Sequence[int], function: StreamFunction, width: int, out: str) -> int:
        """A function of rows -> out, of so many elements. One of its inputs may be what the last norm gave."""
        target = self.buffer(out, width)
        for step in function.steps(*(self._widths[source] for source in sources)):
            self._ops.append(step.operation(sources, target))
            self._kept += [] if step.weight is None else [step.weight]
        return target

    def route(self, source: int, router: PackedLinear, routing: NativeRouting, out: str) -> int:
        """The experts of each row and their weights, in one buffer. The source may be what the last norm gave."""
        logits = self.buffer("router", router.out_features)
        target = self.buffer(out, routing.width)
        self._floats |= {logits, target}
        self._linear(source, router, logits, torch.float32)
        self._ops.append(routing.operation(logits, target))
        self._kept.append(routing)
        return target

    def experts(self, source: int, routed: int, layer: NativeExperts, out: str) -> int:
        """The weighted sum of the experts that `route` chose -> out. The source may be what the last norm gave."""
        target = self.buffer(out, self._widths[source])
        self._ops.append(layer.operation(source, routed, target))
        self._kept.append(layer)
        return target

    def look_up(self, table: Tensor, out: str) -> int:
        """The row of [positions, E] bfloat16 that each token's position has -> out."""
        target = self.buffer(out, table.shape[1])
        self._kept.append(table)
        self._add(LOOK_UP, NO_BUFFER, target, weight=table.data_ptr())
        return target

    def embed(self, tables: tuple[Tensor, Tensor, Tensor], out: str) -> int:
        """The rows of [V, E], [positions, E] and [types, E] bfloat16 of each token, its position and its type, added up
        -> out. The step is run with its tokens."""
        tokens, positions, types = tables
        target = self.buffer(out, tokens.shape[1])
        self._kept += tables
        self._add(
            EMBED,
            NO_BUFFER,
            target,
            weight=tokens.data_ptr(),
            second_weight=positions.data_ptr(),
            third_weight=types.data_ptr(),
        )
        return target

    def gate(self, source: int, gate: int, out: str) -> int:
        """act(first half) * second half -> out, by the number that native code has for the activation."""
        target = self.buffer(out, self._widths[source] // 2)
        self._add(GATE, source, target, gate=gate)
        return target

    def finish(
        self,
        source: int,
        result: int,
        head: PackedLinear | None = None,
        factor: float | None = None,
        limit: float | None = None,
        given: Sequence[int] = (),
        late: bool = False,
    ) -> "LayerPlan":
        """The plan that reads `source` and leaves its result in `result`, which a norm wrote last. With a `head`, it
        can go on to logits, times a factor and capped by a limit where there are such, and tokens: see
        cpu/decode_step.h. `given`: buffers that
        its caller reads beside the result, which nothing writes again; `late`: some of them behind the last
        attention."""
        num_layer_ops = len(self._ops)
        logits = None
        if head is not None:
            logits = self.buffer("logits", head.out_features)
            self._linear(result, head, logits, torch.float32)
            if factor is not None:
                self._add(SCALE, logits, logits, out_dtype=DTYPES[torch.float32], factor=factor)
            if limit is not None:
                self._add(SOFT_CAP, logits, logits, factor=limit)
            self._add(CHOOSE, logits, NO_BUFFER)
        places = PlanPlaces(source, result, logits, tuple(given), late, frozenset(self._floats))
        return LayerPlan(self._ops, num_layer_ops, self._widths, places, self._groups, self._kept, self._of_step)

    def _linear(self, source: int, packed: PackedLinear, target: int, dtype: torch.dtype) -> None:
        self._kept += packed.tensors
        self._add(LINEAR, source, target, linear=packed.struct, out_dtype=DTYPES[dtype])

    def _norm(self, source: int, norm: NormWeight, out: str, residual: int, total: int, *, stored: bool) -> int:
        target = self.buffer(out, len(norm.weight))
        self._kept += [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
        self._add(
            NORM,
            source,
            target,
            residual_in=residual,
            residual_out=total,
            weight=norm.weight.data_ptr(),
            second_weight=None if norm.bias is None else norm.bias.data_ptr(),
            weight_dtype=DTYPES[norm.weight.dtype],
            centers=norm.centers,
            stored=stored,
            eps=norm.eps,
        )
        return target

    def _add(self, kind: int, source: int, out: int, **values: object) -> None:
        values = {"residual_in": NO_BUFFER, "residual_out": NO_BUFFER} | values
        self._ops.append(Op(kind=kind, input=source, out=out, **values))


@dataclass(frozen=True, slots=True)
class PlanPlaces:
    """The buffers of a plan that its caller reads and writes, by number."""

    source: int
    result: int
    logits: int | None
    """Of float32; None of a plan without a head."""
    given: tuple[int, ...] = ()
    """Read beside the result."""
    given_late: bool = False
    """Whether rows of these are missing where rows of the result are."""
    floats: frozenset[int] = frozenset()
    """Of float32, beside the logits; all others are bfloat16."""


class LayerPlan:
    """Runs a plan. Its buffers grow to the largest step; a result is valid until the next run."""

    def __init__(
        self,
        ops: list[Op],
        num_layer_ops: int,
        widths: list[int],
        places: PlanPlaces,
        groups: list[str],
        kept: list[object],
        of_step: Sequence[int] = (),
    ) -> None:
        """`of_step`: operations, by number, those of each attention layer together, whose keys and values are memory of
        the plan."""
        self.groups = tuple(groups)
        """Attention layers, in the order in which `run` wants their batches."""
        self.places = places
        self.ops = (Op * len(ops))(*ops)
        """Those after the first `num_layer_ops` are head and choice."""
        self.widths = (ctypes.c_int64 * len(widths))(*widths)
        self.addresses = (ctypes.c_void_p * len(widths))()
        """Of the buffers, when `reserve` was called."""
        self.num_layer_ops = num_layer_ops
        self._kept = kept
        self._of_step = of_step
        self._step_memory = torch.empty(0)
        self._capacity = 0
        self._num_logits = 0
        self._buffers: list[Tensor] = []
        self.look_ups: dict[int, LookUp] = {}
        """Buffers that the caller of `run` gives, beside what it embeds: what makes them of tokens."""
        self._batches = (ctypes.c_void_p * max(len(groups), 1))()

    @property
    def keeps_nothing(self) -> bool:
        """Whether keys and values are memory of the plan: then `reserve_keys` comes before each run."""
        return bool(self._of_step)

    def reserve_keys(self, num_blocks: int, block_size: int) -> None:
        """Have memory for the keys and values of a step in so many blocks. Two layers take turns with it: none writes
        before all have read what the last but one wrote."""
        layer = self.ops[self._of_step[0]].layer
        shape = (2, 2, num_blocks, layer.num_kv_heads, block_size, layer.head_size)
        if self._step_memory.numel() < math.prod(shape):
            # Half as much again, so that it does not grow with every other step.
            self._step_memory = torch.empty(2, 2, num_blocks + num_blocks // 2, *shape[3:], dtype=torch.bfloat16)
            for index, number in enumerate(self._of_step):
                place = _cache_place(self._step_memory[index // 2 % 2])
                for name, value in place.items():
                    setattr(self.ops[number], name, value)

    def run(
        self,
        source: Tensor | StepTokens,
        positions: Tensor,
        batches: list[int],
        wanted: Tensor | None = None,
        looked_up: Sequence[Tensor] = (),
    ) -> Tensor:
        """[T, E] embedded tokens, or the tokens where the plan embeds them, [T] int64, the address of a native Batch
        per attention layer -> [T, E]. With `wanted`, [L] int64, ascending, only these rows of the result are sure to be
        computed. `looked_up`: what the `look_ups` have made of the tokens, [T, n] each.

        Raises MemoryError.
        """
        num_tokens = len(positions)
        places = self.places
        self.reserve(num_tokens)
        if places.given_late:
            wanted = None
        tokens = source if isinstance(source, StepTokens) else None
        # Nothing writes to what is given, so it is read where it is.
        given = dict(zip(self.look_ups, looked_up, strict=True))
        if isinstance(source, Tensor):
            given[places.source] = source = source.contiguous()
        own = {buffer: self.addresses[buffer] for buffer in given}
        for buffer, tensor in given.items():
            self.addresses[buffer] = tensor.data_ptr()
        for index, address in enumerate(batches):
            self._batches[index] = address
        run = Run(
            positions.data_ptr(),
            num_tokens,
            ctypes.addressof(self.addresses),
            ctypes.addressof(self.widths),
            ctypes.addressof(self._batches),
            None,
            None if wanted is None else wanted.data_ptr(),
            0 if wanted is None else len(wanted),
            None if tokens is None else tokens.ids.data_ptr(),
            None if tokens is None or tokens.types is None else tokens.types.data_ptr(),
        )
        failed = loaded_library().run_plan(
            ctypes.addressof(self.ops), self.num_layer_ops, ctypes.addressof(run), torch.get_num_threads()
        )
        for buffer, before in own.items():
            self.addresses[buffer] = before
        if failed:
            raise MemoryError("no memory for the working space of a step")
        return self._buffers[places.result][:num_tokens]

    def store_result(self) -> None:
        """From now on the result is there after decode steps too, as `result` gives it."""
        self.ops[self.num_layer_ops - 1].stored = 1

    def result(self, num_rows: int) -> Tensor:
        """[R, E] of the last decode step, good until the next one: its first rows or, where fewer are sampled from than
        are computed, those."""
        return self._buffers[self.places.result][:num_rows]

    def given(self, num_tokens: int, source: Tensor | None = None) -> tuple[Tensor, ...]:
        """[T, E] each, what the last step leaves in the buffers that are given beside the result; good until the next
        one. `source`: what `run` was given, if that ran it."""
        places = self.places
        return tuple(
            self._buffers[place][:num_tokens] if source is None or place != places.source else source
            for place in places.given
        )

    @property
    def vocab_size(self) -> int:
        """Logits of a row; 0 without a head."""
        return 0 if self.places.logits is None else self.widths[self.places.logits]

    def logits(self, rows: Tensor) -> Tensor:
        """[L] int64 rows of the last decode step, ascending -> their logits, [L, V] float32, to be changed at will and
        good until the next step. Rows side by side are not copied."""
        if self.places.logits is None:
            raise RuntimeError("a plan without a head has no logits")
        found = self._buffers[self.places.logits]
        first = int(rows[0]) if len(rows) else 0
        if len(rows) and int(rows[-1]) - first == len(rows) - 1:
            return found[first : first + len(rows)]
        return found.index_select(0, rows)

    def reserve(self, num_tokens: int, num_logits: int = 0) -> None:
        """Have buffers for so many tokens, and for the logits of so many rows."""
        if num_tokens > self._capacity:
            self._capacity = _capacity(num_tokens)
            places = self.places
            self._buffers = [
                torch.empty(
                    0 if index == places.logits else self._capacity,
                    width,
                    dtype=torch.float32 if index in places.floats else torch.bfloat16,
                )
                for index, width in enumerate(self.widths)
            ]
            self.addresses[:] = [buffer.data_ptr() for buffer in self._buffers]
            self._num_logits = 0
        if num_logits > self._num_logits and self.places.logits is not None:
            where = self.places.logits
            self._num_logits = _capacity(num_logits, 1)
            self._buffers[where] = torch.empty(self._num_logits, self.widths[where])
            self.addresses[where] = self._buffers[where].data_ptr()


@dataclass(frozen=True, slots=True)
class NativeNetwork:
    """A model as native code takes it, tokens to tokens."""

    plan: LayerPlan
    """With a head."""
    embedding: PackedLinear | Tensor
    """Whose rows are embeddings, [V, E]; a tensor is bfloat16."""
    embedding_scale: float = 1.0
    look_ups: Mapping[int, TokenTable] = field(default_factory=dict)
    """Buffers of the plan: what tokens have there."""


def _cache_place(cache: Tensor) -> dict[str, int]:
    """A cache as an operation has it."""
    return {
        "kv_cache": cache.data_ptr(),
        "values_offset": cache.stride(0),
        "block_stride": cache.stride(1),
        "kv_dtype": KV_DTYPES[cache.dtype],
    }


def _tables(rope: tuple[Tensor, Tensor] | None) -> dict[str, int]:
    """Rotary tables as an operation has them; nothing where there are none."""
    if rope is None:
        return {}
    cos, sin = rope
    return {
        "cos": cos.data_ptr(),
        "sin": sin.data_ptr(),
        "table_stride": cos.stride(0),
        "half": cos.shape[1] // 2,
        "table_dtype": DTYPES[cos.dtype],
    }


def _capacity(num_tokens: int, least: int = MIN_CAPACITY) -> int:
    return max(least, 1 << (num_tokens - 1).bit_length())
