"""`EventRecorder`: writes down what becomes findable in the prefix cache, and what no longer is. Off: `CacheEvents`.

Knows nothing about who reads it, or how it gets there: an `EventSink` does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.kv_cache.pool_observer import PoolObserver
from pagemill.engine.kv_cache.prefix_hash import GROUP_BYTES, ExtraKeys, extra_keys
from pagemill.engine.request import Request
from pagemill.messages.kv_events import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KVEvent,
)
from pagemill.messages.kv_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)

SPEC_KINDS: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full_attention",
    MLASpec: "mla_attention",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalSpec: "chunked_local_attention",
    MambaSpec: "mamba",
}
WIRE_HASH_BYTES = 8


class CacheEvents(PoolObserver):
    """Observes a pool for subscribers. This one writes nothing down."""

    def begin(self, request: Request, first_block: int) -> None:
        """Blocks of one group of `request` are going to be stored, in order of position, the first of them at
        `first_block` or later."""

    def take(self) -> Sequence[KVEvent]:
        """What happened since the last call, in order. The events are the caller's from now on."""
        return ()


NO_EVENTS = CacheEvents()


class EventSink(Protocol):
    """Takes events to those who subscribed to them."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """What happened in one step; not empty. Never blocks."""

    def shutdown(self) -> None:
        """No more events will come. May be called twice."""


class NoSink:
    """Nobody subscribed."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class _Layout:
    """A KV group, as its events describe it."""

    block_size: int
    stride: int
    """Hashes per block."""
    spec_kind: str | None
    window: int | None


class EventRecorder(CacheEvents):
    """Whoever applies the events in order holds exactly the keys that `BlockPool.find` finds.

    Consecutive blocks of a request become one event, and so do consecutive removals from a group.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        # As in coordinator.py: requests are hashed in pieces of which every group's block is a multiple.
        hash_block_size = math.gcd(*(group.spec.block_size for group in config.groups))
        self._layouts = [_layout(group.spec, hash_block_size) for group in config.groups]
        self._events: list[KVEvent] = []
        self._request: Request | None = None
        self._next_block = 0
        self._run: BlockStored | None = None
        """The last event, as long as the block at `_next_block` would continue it."""

    def begin(self, request: Request, first_block: int) -> None:
        """Blocks of one group of `request` are going to be stored."""
        self._request = request
        self._next_block = first_block
        self._run = None

    def stored(self, key: bytes, block: int) -> None:
        """Raises RuntimeError for a key that does not belong to the request that was announced."""
        request = self._request
        if request is None:
            raise RuntimeError("a block was stored for no request")
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        digest = key[:-GROUP_BYTES]
        layout = self._layouts[group]
        index = self._position(request, layout, digest)
        run = self._run
        if run is None or index != self._next_block:
            run = self._begin_run(request, layout, group, index)
        self._run = run
        self._next_block = index + 1
        start = index * layout.block_size
        run.block_hashes.append(wire_hash(digest))
        run.token_ids.extend(request.token_ids[start : start + layout.block_size])
        if run.extra_keys is not None:
            run.extra_keys.append(_wire_keys(extra_keys(request, index, layout.block_size)))

    def removed(self, key: bytes, block: int) -> None:
        self._run = None
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        number = wire_hash(key[:-GROUP_BYTES])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(number)
        else:
            self._events.append(BlockRemoved([number], MEDIUM_DEVICE, group))

    def cleared(self) -> None:
        self._run = None
        self._events.append(AllBlocksCleared())

    def take(self) -> Sequence[KVEvent]:
        """What happened since the last call."""
        if not self._events:
            return ()
        self._run = None
        taken, self._events = self._events, []
        return taken

    def _position(self, request: Request, layout: _Layout, digest: bytes) -> int:
        """Which of the request's blocks it is. Blocks before it were found already, or are out of the window."""
        hashes = request.block_hashes
        stride = layout.stride
        for index in range(self._next_block, len(hashes) // stride):
            if hashes[(index + 1) * stride - 1] == digest:
                return index
        raise RuntimeError(f"a block was stored that is none of {request} from block {self._next_block} on")

    def _begin_run(self, request: Request, layout: _Layout, group: int, index: int) -> BlockStored:
        lora = request.lora
        plain = request.cache_salt is None and lora is None and not request.mm_items
        run = BlockStored(
            block_hashes=[],
            parent_block_hash=wire_hash(request.block_hashes[index * layout.stride - 1]) if index else None,
            token_ids=[],
            block_size=layout.block_size,
            lora_id=None if lora is None else lora.lora_id,
            medium=MEDIUM_DEVICE,
            lora_name=None if lora is None else lora.name,
            extra_keys=None if plain else [],
            group_idx=group,
            kv_cache_spec_kind=layout.spec_kind,
            kv_cache_spec_sliding_window=layout.window,
        )
        self._events.append(run)
        return run


def wire_hash(digest: bytes) -> int:
    """A block's hash as subscribers see it: its last eight bytes, as an unsigned number."""
    return int.from_bytes(digest[-WIRE_HASH_BYTES:], "big")


def _layout(spec: KVCacheSpec, hash_block_size: int) -> _Layout:
    window = spec.window if isinstance(spec, SlidingWindowSpec) else None
    return _Layout(spec.block_size, spec.block_size // hash_block_size, SPEC_KINDS.get(type(spec)), window)


def _wire_keys(keys: ExtraKeys) -> tuple[ExtraKey, ...] | None:
    """The extra keys of one block for subscribers. Names that are no Unicode text are made so: none may be lost to an
    encoder that refuses them."""
    return tuple([_wire_key(*key) for key in keys]) or None


def _wire_key(kind: str, name: bytes, number: int) -> ExtraKey:
    text = name.decode("utf-8", "replace")
    return (text, -number) if kind == "item" else text
