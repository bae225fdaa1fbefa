"""`ClientStore`: what clients have had stored, in memory: bounded in bytes, in number and in time, for each key apart.
Does not know what an API makes of it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from pagemill.errors import EngineOverloadedError
from pagemill.serve.http.errors import NotKeptError

LEAST_BYTES: Final = 1024
"""What anything counts for, however small: so the number of things is bounded too."""
LEAST_WAIT_S: Final = 1.0
RETRY_AFTER_S: Final = 5


class Keepable(Protocol):
    """Something that can be stored."""

    @property
    def id(self) -> str:
        """What it is found by."""

    @property
    def num_bytes(self) -> int:
        """Its size now."""

    @property
    def in_progress(self) -> bool:
        """Whether it is being written, and must stay."""

    async def close(self) -> None:
        """It is not stored any more: end what is still being done for it."""


Kept = TypeVar("Kept", bound=Keepable)


class _Entry:
    __slots__ = ("expires_at", "num_bytes", "value")

    def __init__(self, value: Keepable) -> None:
        self.value = value
        self.num_bytes = 0
        self.expires_at = 0.0


class _Share:
    """What one owner has: the oldest first."""

    __slots__ = ("entries", "num_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0


class ClientStore:
    """Of one event loop. An owner finds its own things only; another's do not exist for it."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: of each owner. `ttl_s`: how long a thing stays after it was written last."""
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._shares: dict[bytes, _Share] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, owner: bytes, value: Keepable) -> bool:
        """Store a thing, or what it has become; the oldest of its owner make room. False, and it is stored no more,
        where there is no room even so: it is too large, or the others are in progress."""
        self._drop_expired()
        share = self._shares.setdefault(owner, _Share())
        entry = share.entries.pop(value.id, None) or _Entry(value)
        share.num_bytes -= entry.num_bytes
        size = max(value.num_bytes, LEAST_BYTES)
        movable = {name: other.num_bytes for name, other in share.entries.items() if not other.value.in_progress}
        if share.num_bytes - sum(movable.values()) + size > self._max_bytes:
            return False
        for name, num_bytes in movable.items():
            if share.num_bytes + size <= self._max_bytes:
                break
            del share.entries[name]
            share.num_bytes -= num_bytes
        entry.value = value
        entry.num_bytes = size
        entry.expires_at = self._clock() + self._ttl_s
        share.entries[value.id] = entry
        share.num_bytes += size
        self._wake_later()
        return True

    def put_new(self, owner: bytes, value: Keepable) -> None:
        """Store a thing before anything is done for it. Raises EngineOverloadedError where there is no room."""
        if not self.put(owner, value):
            raise EngineOverloadedError(
                f"what is being written for this client leaves no room to store {max(value.num_bytes, LEAST_BYTES)} "
                f"bytes (--response-store-bytes leaves it {self._max_bytes})",
                RETRY_AFTER_S,
            )

    def get(self, owner: bytes, name: str, kind: type[Kept]) -> Kept:
        """The thing of that id and kind. Raises NotKeptError."""
        self._drop_expired()
        share = self._shares.get(owner)
        entry = share.entries.get(name) if share is not None else None
        if entry is None or not isinstance(entry.value, kind):
            raise NotKeptError(
                f"{name[:100]!r} is not stored here: it never was, was deleted, had to make room, or has expired"
            )
        return entry.value

    async def remove(self, owner: bytes, name: str, kind: type[Keepable]) -> None:
        """Store it no more. Raises NotKeptError."""
        value = self.get(owner, name, kind)
        share = self._shares[owner]
        share.num_bytes -= share.entries.pop(name).num_bytes
        await value.close()

    async def close(self) -> None:
        """Store nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        values = [entry.value for share in self._shares.values() for entry in share.entries.values()]
        self._shares = {}
        for value in values:
            await value.close()

    def _drop_expired(self) -> None:
        """What is in progress stays until it is written."""
        now = self._clock()
        for owner, share in list(self._shares.items()):
            for name, entry in list(share.entries.items()):
                if entry.expires_at > now:
                    break  # those behind it were written later
                if not entry.value.in_progress:
                    share.num_bytes -= share.entries.pop(name).num_bytes
            if not share.entries:
                del self._shares[owner]

    def _wake_later(self) -> None:
        """Things go when their time is over, also where nobody asks."""
        if self._timer is not None:
            return
        oldest = [next(iter(share.entries.values())).expires_at for share in self._shares.values() if share.entries]
        if oldest:
            delay = max(min(oldest) - self._clock(), LEAST_WAIT_S)
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._drop_expired()
        self._wake_later()
