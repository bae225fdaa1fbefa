"""`DecodeStep`: a whole decode step - batch, embedding, layers, head, choice of the tokens - as one native call.

A step of one request computes for milliseconds, and reads all weights: what Python, numpy and torch need to prepare it
has left the caches by then. Knows slots by their arrays; nothing about requests, processors of logits or schedulers.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.messages.step import Int32Array
from pagemill.model.kernels.layer_plan import NativeNetwork
from pagemill.model.kernels.linear import PackedLinear
from pagemill.model.kernels.mirrors import (
    DecodeStruct,
    LinearStruct,
    LookUpStruct,
    MasksStruct,
    SlotsStruct,
    TableStruct,
)
from pagemill.model.kernels.native import loaded_library
from pagemill.worker.batch.block_tables import SlotTable
from pagemill.worker.batch.request_states import SlotArrays
from pagemill.worker.batch.row_masks import LEFT, RowMasks

MAX_ROWS = 64
"""Requests of a step. With more of them what is saved is little, and room for their logits is kept."""
MAX_SAMPLED = 128
"""Rows that are sampled from: one of each request, and one for each draft."""
MAX_TOKENS = 256
"""Tokens that a step computes for all requests together. With more of them what is saved is little."""


class Acceptance(IntEnum):
    """Whether a step can run, as `PmAcceptance` in decode_step.h, and TOO_MANY_ROWS."""

    ACCEPTED = 0
    NOT_A_DECODE_STEP = 1
    """Some request samples no token, or they compute more than MAX_TOKENS."""
    UNKNOWN_TOKEN = 2
    """There is no embedding for a token."""
    TOO_MANY_ROWS = 3
    CHANGED_DRAFTS = 4
    """Drafts of a slot that is `processed`."""


class Decoded(NamedTuple):
    """What a step sampled."""

    token_ids: Int32Array
    """[N] slot after slot."""
    counts: Int32Array | None
    """[R] tokens of each slot; None: one each."""


class DecodeStep:
    """Steps of one network and one set of slots: `accepts`, then `run`. Not for several threads at a time."""

    def __init__(self, network: NativeNetwork, slots: SlotArrays, tables: Sequence[SlotTable]) -> None:
        plan = network.plan
        self._plan = plan
        self._num_words = -(-plan.vocab_size // 32)
        self._kept = (network, slots, tables)
        self._tables = (TableStruct * len(tables))(
            *(TableStruct(table.blocks.ctypes.data, table.blocks.shape[1], table.block_size) for table in tables)
        )
        place = {name: index for index, table in enumerate(tables) for name in table.layers}
        self._layer_tables = (ctypes.c_int64 * len(plan.groups))(*(place[name] for name in plan.groups))
        embedding, rows = _embedding(network.embedding)
        tables_beside = network.look_ups.items()
        self._look_ups = (LookUpStruct * len(tables_beside))(
            *(
                LookUpStruct(buffer, *_embedding(found.embedding), found.scale, found.known)
                for buffer, found in tables_beside
            )
        )
        self._decode = DecodeStruct(
            ctypes.addressof(plan.ops),
            len(plan.ops),
            plan.num_layer_ops,
            ctypes.addressof(plan.addresses),
            ctypes.addressof(plan.widths),
            plan.places.source,
            embedding,
            rows,
            network.embedding_scale,
            ctypes.addressof(self._look_ups),
            len(self._look_ups),
            _slots(slots),
            ctypes.addressof(self._tables),
            len(tables),
            ctypes.addressof(self._layer_tables),
            len(plan.groups),
        )
        self._address = ctypes.addressof(self._decode)
        # Arguments are copied to where their addresses are known: asking an array for its own takes longer.
        self._slots, self._row_slots, self._counts, self._tokens, self._kept_counts = arrays = tuple(
            np.zeros(MAX_SAMPLED, np.int32) for _ in range(5)
        )
        self._addresses = tuple(int(array.ctypes.data) for array in arrays)
        self._num_known, self._num_computed = slots.num_tokens, slots.num_computed
        self._accepts = loaded_library().decode_accepts
        self._run = loaded_library().decode_step
        self._compute = loaded_library().decode_logits
        self._choose = loaded_library().decode_choose
        self._num_accepted = 0
        self._num_computable = 0
        self._num_tokens = 0
        self._num_run = 0
        self._num_rows: Int32Array | None = None
        """[R] of the last step, rows of each slot that are sampled from; None: one each."""

    def accepts(self, slots: Int32Array, num_tokens: Int32Array) -> Acceptance:
        """Whether the step of these [R] slots, which compute so many tokens each, is one that `run` can do: each of at
        most MAX_ROWS slots computes all that it has beyond what it has computed, one token or a few; what it computes
        beyond that are drafts, which lie behind its tokens."""
        count = len(slots)
        self._num_accepted = self._num_computable = self._num_run = 0
        self._num_rows = None
        if count > MAX_ROWS:
            return Acceptance.TOO_MANY_ROWS
        total = int(num_tokens.sum())
        if total > MAX_TOKENS:
            return Acceptance.NOT_A_DECODE_STEP
        self._slots[:count] = slots
        self._counts[:count] = num_tokens
        if total > count:
            num_rows = num_tokens + self._num_computed[slots] - self._num_known[slots] + 1
            if int(num_rows.sum()) > MAX_SAMPLED:
                return Acceptance.TOO_MANY_ROWS
            if (num_rows > 1).any():
                self._num_rows = num_rows
        own_slots, _, counts, _, _ = self._addresses
        outcome = Acceptance(self._accepts(self._address, own_slots, counts, count))
        self._num_tokens = total
        if outcome in (Acceptance.ACCEPTED, Acceptance.CHANGED_DRAFTS):
            self._num_computable = count
        if outcome is Acceptance.ACCEPTED:
            self._num_accepted = count
        return outcome

    def run(self) -> Decoded:
        """The step that was accepted last: the tokens that its slots sampled, which they have and count now. Of drafts,
        those are among them that are what was sampled in their place, up to the first that is not.

        A slot that is `processed` is computed and counts that, and nothing else: its one token says nothing, and its
        logits wait for whoever changes them (`logits`). Raises MemoryError, and RuntimeError without such a step."""
        count, self._num_accepted = self._num_accepted, 0
        self._num_run = count
        if not count:
            raise RuntimeError("run was called without a step that was accepted")
        self._plan.reserve(self._num_tokens, count if self._num_rows is None else int(self._num_rows.sum()))
        own_slots, _, counts, tokens, kept = self._addresses
        if self._run(self._address, own_slots, counts, count, tokens, kept, torch.get_num_threads()):
            raise MemoryError("no memory for the working space of a step")
        if self._num_rows is None:
            return Decoded(self._tokens[:count].copy(), None)
        num_kept = self._kept_counts[:count].copy()
        return Decoded(self._tokens[: num_kept.sum()].copy(), num_kept)

    @property
    def samples_all(self) -> bool:
        """Whether all rows that the step computes which `accepts` was asked about last are sampled from."""
        count = self._num_computable
        rows = count if self._num_rows is None else int(self._num_rows.sum())
        return rows == self._num_tokens

    def compute(self) -> Tensor:
        """The step that was accepted last, or that has CHANGED_DRAFTS, up to the logits, to be changed at will and good
        until the next one: [N, V] float32, a row for each of its slots and for each draft, slot after slot. Slots stay
        as they are. Raises MemoryError, and RuntimeError without such a step."""
        count, self._num_computable = self._num_computable, 0
        if not count:
            raise RuntimeError("compute was called without a step that can be computed")
        num_rows = count if self._num_rows is None else int(self._num_rows.sum())
        self._plan.reserve(self._num_tokens, num_rows)
        own_slots, _, counts, _, _ = self._addresses
        if self._compute(self._address, own_slots, counts, count, torch.get_num_threads()):
            raise MemoryError("no memory for the working space of a step")
        return self._plan.logits(torch.arange(num_rows))

    def store_hidden(self) -> None:
        """From now on `hidden` gives the result of the layers."""
        self._plan.store_result()

    def hidden(self, num_tokens: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of the last step, which computed so many tokens: the rows of the layers' result that were sampled from come
        first, [T, E]; and what the network keeps, [T, E] each. Good until the next step."""
        return self._plan.result(num_tokens), self._plan.given(num_tokens)

    def choose(self, masks: RowMasks, tokens: Int32Array) -> None:
        """Sample for slots of the last step that `run` left to others: those of its [R] rows that are not LEFT, whose
        slots must be `processed`. The tokens go to `tokens`, [R] int32, and to the slots. Raises MemoryError, and
        ValueError for masks of other rows or of another vocabulary."""
        count, words = self._num_run, masks.words
        if count == 0 or len(masks.rows) != count:
            raise ValueError(f"masks of {len(masks.rows)} rows for a step of {count}")
        if len(words) and (words.shape[1] < self._num_words or not words.flags.c_contiguous):
            raise ValueError(f"masks of shape {words.shape} must be contiguous, with {self._num_words} words each")
        first = self._first_rows()
        slots = self._slots[:count]
        if self._num_rows is not None:
            slots = np.repeat(slots, self._num_rows)
            count = len(slots)
            self._counts[:count] = LEFT
        self._row_slots[:count] = slots
        self._counts[first] = masks.rows
        _, row_slots, rows, own_tokens, _ = self._addresses
        struct = MasksStruct(words.ctypes.data, words.shape[1], rows)
        address = ctypes.addressof(struct)
        if self._choose(self._address, row_slots, count, address, own_tokens, torch.get_num_threads()):
            raise MemoryError("no memory for the working space of a step")
        chosen = masks.rows != LEFT
        tokens[chosen] = self._tokens[first][chosen]

    def logits(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """The logits with which these [L] ascending ones of the [R] slots of the last step began to sample, [L, V]
        float32, to be changed at will and good until the next one."""
        return self._plan.logits(torch.from_numpy(rows if self._num_rows is None else self._first_rows()[rows]))

    def _first_rows(self) -> npt.NDArray[np.int64]:
        """[R] of the slots of the last step."""
        num_rows = np.ones(self._num_run, np.int32) if self._num_rows is None else self._num_rows
        found: npt.NDArray[np.int64] = (np.cumsum(num_rows) - num_rows).astype(np.int64)
        return found


def _slots(slots: SlotArrays) -> SlotsStruct:
    def address(array: npt.NDArray[Any]) -> int:
        return int(array.ctypes.data)

    counts = (slots.num_tokens, slots.num_computed, slots.num_sampled)
    sampling = (slots.processed, slots.greedy, slots.temperature, slots.min_p, slots.top_k, slots.top_p, slots.seed)
    return SlotsStruct(
        address(slots.token_ids),
        slots.token_ids.shape[1],
        *(address(array) for array in counts),
        *(address(array) for array in sampling),
    )


def _embedding(embedding: PackedLinear | Tensor) -> tuple[LinearStruct, int | None]:
    """The weight, and the address of its rows where these lie one after the other."""
    if isinstance(embedding, PackedLinear):
        return embedding.struct, None
    rows, cols = embedding.shape
    return LinearStruct(None, None, 0, rows, cols, 0), embedding.data_ptr()
