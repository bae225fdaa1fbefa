"""`DecodeStep`: a whole decode step - batch, embedding, layers, head, choice of the tokens - as one native call.

A step of one request computes for milliseconds, and reads all weights: what Python, numpy and torch need to prepare it
has left the caches by then. Knows slots by their arrays; nothing about requests, processors of logits or schedulers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.model.kernels.layer_plan import LayerPlan
from pagemill.model.kernels.linear import LinearStruct, PackedLinear
from pagemill.model.kernels.native import loaded_library

MAX_ROWS = 64
"""Requests of a step. With more of them what is saved is little, and room for their logits is kept."""
_DONE, _NO_MEMORY, _NOT_ONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """What is known of requests, by slot; arrays that stay where they are. token_ids [S, N], the others [S]."""

    token_ids: Int32Array
    num_tokens: Int32Array
    num_computed: Int32Array
    num_sampled: Int32Array
    greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: Int32Array
    """0: no limit."""
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]


class SlotTable(NamedTuple):
    """The block table of one KV group, and the attention layers that use it."""

    blocks: Int32Array
    """[S, blocks], stays where it is."""
    block_size: int
    layers: Sequence[str]


@dataclass(frozen=True, slots=True)
class NativeNetwork:
    """A model as native code takes it, tokens to tokens."""

    plan: LayerPlan
    """With a head."""
    embedding: PackedLinear | Tensor
    """Whose rows are embeddings, [V, E]; a tensor is bfloat16."""
    embedding_scale: float = 1.0


class _Slots(ctypes.Structure):
    """As `PmSlots` in decode_step.h."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("num_tokens", "num_computed", "num_sampled", "greedy")),
        *((name, ctypes.c_void_p) for name in ("temperature", "min_p", "top_k", "top_p", "seed")),
    )


class _Table(ctypes.Structure):
    """As `PmTable` in decode_step.h."""

    _fields_ = (("blocks", ctypes.c_void_p), ("stride", ctypes.c_int64), ("block_size", ctypes.c_int64))


class _Decode(ctypes.Structure):
    """As `PmDecode` in decode_step.h."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("num_ops", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("buffers", "widths")),
        ("source", ctypes.c_int64),
        ("embedding", LinearStruct),
        ("rows", ctypes.c_void_p),
        ("embedding_scale", ctypes.c_double),
        ("slots", _Slots),
        ("tables", ctypes.c_void_p),
        ("num_tables", ctypes.c_int64),
        ("layer_tables", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
    )


class DecodeStep:
    """Steps of one network and one set of slots. Not for several threads at a time."""

    def __init__(self, network: NativeNetwork, slots: SlotArrays, tables: Sequence[SlotTable]) -> None:
        plan = network.plan
        self._plan = plan
        self._kept = (network, slots, tables)
        self._tables = (_Table * len(tables))(
            *(_Table(table.blocks.ctypes.data, table.blocks.shape[1], table.block_size) for table in tables)
        )
        place = {name: index for index, table in enumerate(tables) for name in table.layers}
        self._layer_tables = (ctypes.c_int64 * len(plan.groups))(*(place[name] for name in plan.groups))
        embedding, rows = _embedding(network.embedding)
        self._decode = _Decode(
            ctypes.addressof(plan.ops),
            len(plan.ops),
            ctypes.addressof(plan.addresses),
            ctypes.addressof(plan.widths),
            plan.places.source,
            embedding,
            rows,
            network.embedding_scale,
            _slots(slots),
            ctypes.addressof(self._tables),
            len(tables),
            ctypes.addressof(self._layer_tables),
            len(plan.groups),
        )
        self._address = ctypes.addressof(self._decode)
        # Arguments are copied to where their addresses are known: asking an array for its own takes longer.
        self._slots, self._counts, self._tokens = (np.zeros(MAX_ROWS, np.int32) for _ in range(3))
        self._addresses = tuple(int(array.ctypes.data) for array in (self._slots, self._counts, self._tokens))
        self._call = loaded_library().decode_step

    def run(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array | None:
        """[R] slots and how many tokens each computes -> [R] the tokens that they sampled, which the slots have and
        count from now on. None, and nothing has happened, for any step but one in which every slot computes one token,
        its last, or of more than MAX_ROWS. Raises MemoryError."""
        count = len(slots)
        if count > MAX_ROWS:
            return None
        self._slots[:count] = slots
        self._counts[:count] = num_tokens
        self._plan.reserve(count, logits=True)
        own_slots, counts, tokens = self._addresses
        outcome = self._call(self._address, own_slots, counts, count, tokens, torch.get_num_threads())
        if outcome == _NOT_ONE:
            return None
        if outcome == _NO_MEMORY:
            raise MemoryError("no memory for the working space of a step")
        return self._tokens[:count].copy()


def _slots(slots: SlotArrays) -> _Slots:
    def address(array: npt.NDArray[Any]) -> int:
        return int(array.ctypes.data)

    return _Slots(
        address(slots.token_ids),
        slots.token_ids.shape[1],
        *(address(array) for array in (slots.num_tokens, slots.num_computed, slots.num_sampled, slots.greedy)),
        *(address(array) for array in (slots.temperature, slots.min_p, slots.top_k, slots.top_p, slots.seed)),
    )


def _embedding(embedding: PackedLinear | Tensor) -> tuple[LinearStruct, int | None]:
    """The weight, and the address of its rows where these lie one after the other."""
    if isinstance(embedding, PackedLinear):
        return embedding.struct, None
    rows, cols = embedding.shape
    return LinearStruct(None, None, 0, rows, cols, 0), embedding.data_ptr()
