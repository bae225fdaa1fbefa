"""Weights of a GGUF file under their Hugging Face names, dequantized or as blocks. Tensors are decoded a few ahead, on
threads; of a tensor that is wanted in part, only the blocks that hold the part are read."""

import dataclasses
import math
import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.artifacts.config_fields import MAX_LAYERS
from pagemill.artifacts.gguf_families import family_of
from pagemill.artifacts.gguf_family import GgufFamily, Piece
from pagemill.artifacts.gguf_file import TENSOR_TYPES, GgufTensor, read_gguf
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.loading.block_tensor import BlockTensor
from pagemill.model.loading.load_place import ALONE, LoadPlace
from pagemill.model.loading.part import Part, Select, whole
from pagemill.model.loading.sources.gguf_blocks import FLOATS, as_blocks, dequantize, has_blocks
from pagemill.model.loading.sources.gguf_forms import FORMS, made_shape
from pagemill.utils.math import ceil_div
from pagemill.utils.text import shown_name

_AHEAD = 8
_VALUES_AHEAD = 1 << 28
"""In all tensors that are decoded ahead: a table of vectors or a layer's experts may be as large as all others."""
_FORGET_BYTES = 32 << 20
"""After so many bytes of tensors, pages of the file are given back: beside the weights made of them, they would double
a process's memory."""

SUPPORTED_TYPES = frozenset({name for name, _, _ in TENSOR_TYPES.values()} - {"Q8_K"})


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the checkpoint, what the file has of it, and the part to read."""

    piece: Piece
    shape: tuple[int, ...]
    part: Part

    @property
    def num_values(self) -> int:
        """Of what is decoded."""
        whole = math.prod(self.shape)
        size = self.shape[self.part.dim] if self.shape else 1
        return whole if self.piece.form or not size else whole // size * (self.part.stop - self.part.start)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """What a family's files call their tensors, and what was done to the values when the file was made."""

    family: GgufFamily
    config: Mapping[str, Any]

    def wanted(self, tensors: Mapping[str, GgufTensor], select: Select) -> Iterator[Wanted]:
        """The tensors that are selected. Raises ModelError for names that are not known."""
        for piece in self.family.pieces(tensors, self.config.get("num_hidden_layers") or MAX_LAYERS):
            shape = piece.tensors[0].shape if piece.form is None else made_shape(piece, self.config)
            part = select(piece.name, shape)
            if part is not None:
                yield Wanted(piece, shape, part)

    def undo(self, name: str, values: Tensor, num_rows: int) -> Tensor:
        """Values as Hugging Face has them; `values` are whole heads of the tensor's `num_rows` rows."""
        family = self.family
        if family.norm_offset and name.endswith("norm.weight") and not name.endswith(family.plain_norms or ("/",)):
            return values - family.norm_offset
        for module, heads in family.paired_heads.items():
            if f".{module}." in name:
                return _halves(values, self.config[heads] * len(values) // num_rows)
        return values


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Select = whole, place: LoadPlace = ALONE
) -> Iterator[tuple[str, Tensor | BlockTensor]]:
    """(name, selected part in dtype, or as blocks where that is asked for and possible).

    Raises ModelError for types and names that are not known, ConfigError for any option.
    """
    place.check_options("gguf")
    path = Path(facts.path)
    file = read_gguf(path)
    conversion = Conversion(family_of(file), facts.hf_config)
    with path.open("rb") as opened:
        # Nobody writes; torch would warn of memory that it may not.
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    data = np.frombuffer(mapping, dtype=np.uint8)
    unforgotten = 0
    tensors = deque(conversion.wanted(file.tensors, select))
    pending: deque[tuple[Wanted, Future[Tensor | BlockTensor]]] = deque()
    with ThreadPoolExecutor(torch.get_num_threads(), "dequantize") as pool:
        while tensors or pending:
            while tensors and _goes_ahead(pending, tensors[0]):
                wanted = tensors.popleft()
                pending.append((wanted, pool.submit(_decode, data, wanted, conversion, dtype)))
            wanted, decoded = pending.popleft()
            name, values = wanted.piece.name, decoded.result()
            unforgotten += _num_bytes(values)
            yield name, values
            if unforgotten > _FORGET_BYTES:
                # What was read is in layers now. What is not yet is mapped again when it is touched.
                mapping.madvise(mmap.MADV_DONTNEED)
                unforgotten = 0


def _num_bytes(values: Tensor | BlockTensor) -> int:
    return (values if isinstance(values, Tensor) else values.blocks).nbytes


def _goes_ahead(pending: Sequence[tuple[Wanted, object]], another: Wanted) -> bool:
    """Whether another tensor is decoded before the first of those that are has been taken."""
    num_values = another.num_values + sum(wanted.num_values for wanted, _ in pending)
    return not pending or (len(pending) < _AHEAD and num_values <= _VALUES_AHEAD)


def _decode(data: np.ndarray, wanted: Wanted, conversion: Conversion, dtype: torch.dtype) -> Tensor | BlockTensor:
    piece, part = wanted.piece, wanted.part
    if piece.form is not None:
        return _made(data, wanted, conversion.config, dtype)
    (tensor,) = piece.tensors
    if part.as_stored and has_blocks(tensor):
        blocks = read_blocks(data, tensor, part)
        if blocks is not None:
            rows = conversion.undo(piece.name, blocks.blocks, tensor.shape[0])
            return dataclasses.replace(blocks, blocks=rows)
    values = read_part(data, tensor, part)
    return conversion.undo(piece.name, values, tensor.shape[0]).to(dtype)


def _made(data: np.ndarray, wanted: Wanted, config: Mapping[str, Any], dtype: torch.dtype) -> Tensor | BlockTensor:
    """A tensor that is made of others, or of one in another form, and of that the part that is wanted."""
    piece, part = wanted.piece, wanted.part
    form = FORMS[str(piece.form)]
    if form.of_rows and part.as_stored and part.dim == 0 and all(has_blocks(tensor) for tensor in piece.tensors):
        found = [read_blocks(data, tensor, Part(0, 0, tensor.shape[0], True)) for tensor in piece.tensors]
        kinds = {blocks.kind for blocks in found if blocks is not None}
        if len(kinds) == 1:
            rows = form.make(config, [blocks.blocks for blocks in found if blocks is not None])
            return BlockTensor(kinds.pop(), rows[part.start : part.stop].contiguous())
    made = form.make(config, [_whole(data, tensor, dtype if form.rounds else None) for tensor in piece.tensors])
    return part.of(made.to(dtype)).contiguous()


def _whole(data: np.ndarray, tensor: GgufTensor, dtype: torch.dtype | None) -> Tensor:
    """All of a tensor; with a dtype, matrix by matrix in this type: a stack in float32 would be twice as large."""
    everything = Part(0, 0, tensor.shape[0] if tensor.shape else 1)
    if dtype is None or len(tensor.shape) < 3:
        return read_part(data, tensor, everything)
    values = torch.empty(tensor.shape, dtype=dtype)
    for index in range(tensor.shape[0]):
        values[index] = read_part(data, tensor, Part(0, index, index + 1))[0]
    return values


def read_blocks(data: np.ndarray, tensor: GgufTensor, part: Part) -> BlockTensor | None:
    """A part of a quantized matrix as blocks, mapped where the file has them in this form; None for columns that are
    not whole blocks. Raises ModelError for a type that is not known."""
    raw = _bytes_of(data, tensor)
    _, block, block_bytes = TENSOR_TYPES[tensor.type_id]
    rows = raw.reshape(tensor.shape[0], -1)
    if part.dim == 0:
        return as_blocks(rows[part.start : part.stop], tensor)
    if part.start % block or part.stop % block:
        return None
    first = part.start // block * block_bytes
    last = part.stop // block * block_bytes
    return as_blocks(np.ascontiguousarray(rows[:, first:last]), tensor)


def _bytes_of(data: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    if tensor.num_bytes is None or tensor.type_name not in SUPPORTED_TYPES:
        raise ModelError(f"tensor {shown_name(tensor.name)} is of type {tensor.type_name}, which is not supported")
    return data[tensor.offset : tensor.offset + tensor.num_bytes]


def read_part(data: np.ndarray, tensor: GgufTensor, part: Part) -> Tensor:
    """A part of a tensor as float values. Raises ModelError for a type that is not known.

    Quantized rows are blocks of 32 or 256 values, so that a part that begins within a block is decoded from the
    block's beginning.
    """
    raw = _bytes_of(data, tensor)
    if part.covers(tensor.shape):
        return dequantized(raw, tensor).reshape(tensor.shape)
    _, block, block_bytes = TENSOR_TYPES[tensor.type_id]
    *rest, width = tensor.shape
    rows = range(math.prod(rest))
    columns = range(width)
    if part.dim == len(rest):
        columns = range(part.start, part.stop)
    else:
        per_index = len(rows) // tensor.shape[0]
        rows = range(part.start * per_index, part.stop * per_index)
    first = columns.start // block
    last = ceil_div(columns.stop, block)
    grid = raw.reshape(-1, width // block * block_bytes)[
        rows.start : rows.stop, first * block_bytes : last * block_bytes
    ]
    shape = (len(rows), (last - first) * block)
    decoded = dequantized(np.ascontiguousarray(grid).reshape(-1), dataclasses.replace(tensor, shape=shape))
    values = decoded.reshape(shape)[:, columns.start - first * block : columns.stop - first * block]
    return values.reshape(*tensor.shape[: part.dim], part.stop - part.start, *tensor.shape[part.dim + 1 :])


def dequantized(raw: np.ndarray, tensor: GgufTensor) -> Tensor:
    """The bytes of one tensor as float values, flat; those that are floats in the file in their own type."""
    if tensor.type_name in FLOATS:
        return torch.from_numpy(raw.copy()).view(FLOATS[tensor.type_name])
    if tensor.type_name == "Q4_1":
        return _q4_1(raw)
    rows = raw.reshape(math.prod(tensor.shape[:-1]), -1)
    return torch.from_numpy(np.require(dequantize(rows, tensor).reshape(-1), requirements="W"))


def _q4_1(raw: np.ndarray) -> Tensor:
    """Blocks of 32: float16 scale, float16 minimum, 16 bytes whose low halves come first. Torch does it in parallel,
    several times faster than numpy; the embedded default model is of this type."""
    blocks = torch.from_numpy(raw.reshape(-1, 20).copy())
    limits = blocks[:, :4].contiguous().view(torch.float16).float()
    packed = blocks[:, 4:]
    quants = torch.cat([packed & 15, packed >> 4], dim=1).float()
    return quants.mul_(limits[:, :1]).add_(limits[:, 1:]).reshape(-1)


def _halves(values: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (pair, half) to (half, pair) order. [out, in] or [out]."""
    rest = values.shape[1:]
    return values.reshape(num_heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest)
