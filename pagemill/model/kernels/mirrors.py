"""The structs that native code is given, as ctypes mirrors them: all in one place, checked when the library is loaded.

Knows their layout, not what is done with them. Fields have the order, the types and the names of those in C++.
"""

import ctypes
from collections.abc import Callable

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_double
_MAX_FIELDS = 64


class Batch(ctypes.Structure):
    """One step of one KV group, as `PmBatch` in kernels.h. Holds addresses: the tensors must outlive it."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_start", "seq_lens", "block_table", "slot_mapping")),
        *((name, _INT) for name in ("num_requests", "num_tokens", "block_table_stride", "block_size")),
    )


class Layer(ctypes.Structure):
    """One attention layer, as `PmLayer` in kernels.h. 0 stands for no window, no chunks and no soft cap, and
    for no keys ahead of a token; no address for no sinks and no slopes. Holds addresses."""

    _fields_ = (
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_size", "window", "chunk")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
        ("ahead", _INT),
        *((name, _POINTER) for name in ("sinks", "slopes")),
    )


class LinearStruct(ctypes.Structure):
    """A linear layer, as `PmLinear` in kernels.h. Holds addresses: the tensors must outlive it."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        *((name, _INT) for name in ("format", "rows", "cols", "gate", "activation")),
        ("order", _POINTER),
    )


class Op(ctypes.Structure):
    """One operation, as `PmOp` in layer_plan.h."""

    _fields_ = (
        *((name, _INT) for name in ("kind", "input", "out", "residual_in", "residual_out")),
        *((name, _POINTER) for name in ("weight", "second_weight")),
        *((name, _INT) for name in ("weight_dtype", "centers", "stored")),
        ("eps", _FLOAT),
        ("linear", LinearStruct),
        ("out_dtype", _INT),
        ("factor", _FLOAT),
        ("layer", Layer),
        ("kv_cache", _POINTER),
        *((name, _INT) for name in ("values_offset", "block_stride", "kv_dtype", "group")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _INT) for name in ("table_stride", "half", "table_dtype")),
        ("third_weight", _POINTER),
        *(
            (name, _INT)
            for name in (
                "gate",
                "columns",
                "key_is_value",
                "whole_norms",
                "shared",
                "third_in",
                "stream",
                "num_streams",
            )
        ),
        *((name, _POINTER) for name in ("routing", "experts", "heads")),
        ("norms_last", _INT),
        ("growth", _POINTER),
        ("growth_step", _INT),
    )


class RoutingStruct(ctypes.Structure):
    """How a router chooses, as `PmRouting` in kernels.h. Holds addresses: the tensors must outlive it."""

    _fields_ = (
        *((name, _INT) for name in ("num_experts", "top_k", "sigmoid", "renormalize")),
        *((name, _INT) for name in ("num_groups", "top_groups", "group_by_two")),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("correction", "factors")),
    )


class ExpertsStruct(ctypes.Structure):
    """The experts of a layer, as `PmExperts` in layer_plan.h. Holds addresses."""

    _fields_ = (
        *((name, _POINTER) for name in ("gate_up", "down")),
        *((name, _INT) for name in ("count", "first", "top_k", "inner", "clamped")),
        *((name, _FLOAT) for name in ("alpha", "limit")),
        ("weighs_inputs", _INT),
    )


class HeadsStruct(ctypes.Structure):
    """A linear layer for each head, as `PmHeads` in layer_plan.h. Holds an address."""

    _fields_ = (
        ("layers", _POINTER),
        *((name, _INT) for name in ("count", "in_step", "in_first", "out_step", "out_first")),
    )


class Run(ctypes.Structure):
    """One call, as `PmRun` in layer_plan.h."""

    _fields_ = (
        ("positions", _POINTER),
        ("num_tokens", _INT),
        *((name, _POINTER) for name in ("buffers", "widths", "batches", "choice", "wanted")),
        ("num_wanted", _INT),
        *((name, _POINTER) for name in ("tokens", "types")),
    )


class SlotsStruct(ctypes.Structure):
    """What is known of requests, by slot, as `PmSlots` in decode_step.h."""

    _fields_ = (
        ("token_ids", _POINTER),
        ("token_stride", _INT),
        *((name, _POINTER) for name in ("num_tokens", "num_computed", "num_sampled", "processed", "greedy")),
        *((name, _POINTER) for name in ("temperature", "min_p", "top_k", "top_p", "seed")),
    )


class TableStruct(ctypes.Structure):
    """The block table of a KV group, as `PmTable` in decode_step.h."""

    _fields_ = (("blocks", _POINTER), ("stride", _INT), ("block_size", _INT))


class LookUpStruct(ctypes.Structure):
    """What a token has beside its embedding, as `PmLookUp` in decode_step.h. Holds addresses."""

    _fields_ = (
        ("buffer", _INT),
        ("embedding", LinearStruct),
        ("rows", _POINTER),
        ("scale", _FLOAT),
        ("known", _INT),
    )


class DecodeStruct(ctypes.Structure):
    """A decode step, as `PmDecode` in decode_step.h."""

    _fields_ = (
        ("ops", _POINTER),
        *((name, _INT) for name in ("num_ops", "num_layer_ops")),
        *((name, _POINTER) for name in ("buffers", "widths")),
        ("source", _INT),
        ("embedding", LinearStruct),
        ("rows", _POINTER),
        ("embedding_scale", _FLOAT),
        ("look_ups", _POINTER),
        ("num_look_ups", _INT),
        ("slots", SlotsStruct),
        ("tables", _POINTER),
        ("num_tables", _INT),
        ("layer_tables", _POINTER),
        ("num_layers", _INT),
    )


class MasksStruct(ctypes.Structure):
    """Masks of the rows of a decode step, as `PmMasks` in decode_step.h. Holds addresses."""

    _fields_ = (("words", _POINTER), ("stride", _INT), ("rows", _POINTER))


class NgramsStruct(ctypes.Structure):
    """A table of n-grams, as `PmNgrams` in token_index.h. Holds addresses: the arrays must outlive it."""

    _fields_ = (
        *((name, _POINTER) for name in ("text", "ends")),
        *((name, _INT) for name in ("bits", "shortest", "longest", "seed")),
    )


class TrieStruct(ctypes.Structure):
    """A trie of tokens, as `PmTrie` in token_index.h. Holds addresses: the arrays must outlive it."""

    _fields_ = (
        *((name, _POINTER) for name in ("text", "nodes", "slots", "active")),
        *((name, _INT) for name in ("bits", "max_nodes", "max_depth", "num_nodes", "num_active", "num_tokens", "seed")),
    )


MIRRORS: dict[str, type[ctypes.Structure]] = {
    "PmBatch": Batch,
    "PmLayer": Layer,
    "PmLinear": LinearStruct,
    "PmOp": Op,
    "PmRun": Run,
    "PmSlots": SlotsStruct,
    "PmTable": TableStruct,
    "PmDecode": DecodeStruct,
    "PmLookUp": LookUpStruct,
    "PmMasks": MasksStruct,
    "PmNgrams": NgramsStruct,
    "PmTrie": TrieStruct,
    "PmRouting": RoutingStruct,
    "PmExperts": ExpertsStruct,
    "PmHeads": HeadsStruct,
}
"""By their names in C++."""


def layout_of(mirror: type[ctypes.Structure]) -> list[int]:
    """Its size in bytes, then the offset of each field."""
    return [ctypes.sizeof(mirror), *(getattr(mirror, field[0]).offset for field in mirror._fields_)]


def check_layouts(describe: Callable[..., int]) -> None:
    """Compare every mirror with what the library says of its struct. `describe(name, values, capacity)` writes what
    `layout_of` returns, and returns how many numbers that is, 0 for a name that it does not know. Raises RuntimeError
    that names the struct."""
    for name, mirror in MIRRORS.items():
        values = (ctypes.c_int64 * _MAX_FIELDS)()
        count = describe(name.encode(), ctypes.addressof(values), _MAX_FIELDS)
        found = list(values[:count])
        expected = layout_of(mirror)
        if found != expected:
            raise RuntimeError(f"{name} is laid out as {found} in the library, and as {expected} in {mirror.__name__}")
