"""Subscribers to KV cache events: a strict one for tests, and the one that the documentation shows."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.events import wire_hash
from pagemill.engine.kv_cache.prefix_hash import GROUP_BYTES
from pagemill.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "kv-cache.md"


def documented_subscriber() -> Any:
    """The class `Subscriber` of docs/kv-cache.md."""
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(import msgspec\n.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, names)
    return names["Subscriber"]


def findable(pool: BlockPool) -> set[tuple[int, int]]:
    """What the pool finds, as (group, hash) in the numbers of the events."""
    keys = set(pool.cached_blocks().values())
    assert all(pool.find(key) is not None for key in keys)
    return {(int.from_bytes(key[-GROUP_BYTES:], "big"), wire_hash(key[:-GROUP_BYTES])) for key in keys}


class StrictSubscriber:
    """Applies events; what is stored twice, removed twice or incomplete fails."""

    def __init__(self) -> None:
        self.cached: dict[tuple[int | None, int], tuple[int | None, list[int]]] = {}
        """(group, hash) -> (hash of the block before, token ids)."""

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.cached[event.group_idx, block]
                case AllBlocksCleared():
                    self.cached.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == len(event.block_hashes) * size > 0
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        for place, block in enumerate(event.block_hashes):
            assert (event.group_idx, block) not in self.cached, "a block is stored twice"
            self.cached[event.group_idx, block] = (parent, event.token_ids[place * size : (place + 1) * size])
            parent = block
