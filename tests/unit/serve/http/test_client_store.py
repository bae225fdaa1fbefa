"""What clients have stored: bounded in bytes, number and time, and apart for each of them."""

import asyncio

import pytest

from pagemill.errors import EngineOverloadedError
from pagemill.serve.http import client_store
from pagemill.serve.http.client_store import LEAST_BYTES, ClientStore
from pagemill.serve.http.errors import NotKeptError

ANN, BOB = b"ann", b"bob"


class Thing:
    """Something of a size."""

    def __init__(self, name: str, num_bytes: int = LEAST_BYTES, *, in_progress: bool = False) -> None:
        self.id = name
        self.num_bytes = num_bytes
        self.in_progress = in_progress
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Other(Thing):
    """Something else."""


def names(store: ClientStore, owner: bytes, among: str) -> str:
    """Those of one character each that are stored."""
    found = ""
    for name in among:
        try:
            store.get(owner, name, Thing)
        except NotKeptError:
            continue
        found += name
    return found


async def test_an_owner_finds_its_own_things_only() -> None:
    store = ClientStore(10 * LEAST_BYTES, 60)
    thing = Thing("a")
    assert store.put(ANN, thing)
    assert store.get(ANN, "a", Thing) is thing
    for owner, name, kind in ((BOB, "a", Thing), (ANN, "b", Thing), (ANN, "a", Other)):
        with pytest.raises(NotKeptError, match="not stored"):
            store.get(owner, name, kind)
    with pytest.raises(NotKeptError):
        await store.remove(BOB, "a", Thing)
    await store.remove(ANN, "a", Thing)
    assert thing.is_closed
    assert names(store, ANN, "a") == ""


async def test_the_oldest_make_room_those_of_the_same_owner() -> None:
    store = ClientStore(3 * LEAST_BYTES, 60)
    assert store.put(BOB, Thing("a"))
    for name in "abcd":
        assert store.put(ANN, Thing(name, 1))  # however small, each counts
    assert (names(store, ANN, "abcd"), names(store, BOB, "abcd")) == ("bcd", "a")
    assert store.put(ANN, store.get(ANN, "b", Thing))  # written again: it is the newest
    assert store.put(ANN, Thing("e", 2 * LEAST_BYTES))
    assert names(store, ANN, "abcde") == "be"


async def test_what_has_grown_too_large_is_stored_no_more() -> None:
    store = ClientStore(2 * LEAST_BYTES, 60)
    thing = Thing("a")
    assert store.put(ANN, thing)
    thing.num_bytes = 3 * LEAST_BYTES
    assert not store.put(ANN, thing)
    assert names(store, ANN, "a") == ""
    assert store.put(ANN, Thing("b", 2 * LEAST_BYTES))
    assert not store.put(ANN, Thing("c", 3 * LEAST_BYTES))
    assert names(store, ANN, "bc") == "b", "nothing makes room in vain"


async def test_what_is_in_progress_stays() -> None:
    store = ClientStore(2 * LEAST_BYTES, 60)
    store.put_new(ANN, Thing("a", in_progress=True))
    store.put_new(ANN, Thing("b"))
    store.put_new(ANN, Thing("c", in_progress=True))
    assert names(store, ANN, "abc") == "ac"
    with pytest.raises(EngineOverloadedError, match="response-store-bytes"):
        store.put_new(ANN, Thing("d"))
    store.put_new(BOB, Thing("d"))


async def test_things_expire() -> None:
    now = 0.0
    store = ClientStore(10 * LEAST_BYTES, 60, lambda: now)
    store.put_new(ANN, Thing("a", in_progress=True))
    store.put_new(ANN, Thing("b"))
    now = 30.0
    store.put_new(ANN, Thing("c"))
    now = 59.0
    assert names(store, ANN, "abc") == "abc"
    now = 60.0
    assert names(store, ANN, "abc") == "ac"
    now = 90.0
    assert names(store, ANN, "abc") == "a"


async def test_things_expire_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_store, "LEAST_WAIT_S", 0.01)
    store = ClientStore(10 * LEAST_BYTES, 0.001)
    store.put_new(ANN, Thing("a"))
    async with asyncio.timeout(60):
        while store._shares:
            await asyncio.sleep(0.01)


async def test_closing_ends_what_is_done_for_them() -> None:
    store = ClientStore(10 * LEAST_BYTES, 60)
    things = [Thing("a", in_progress=True), Thing("b")]
    for thing in things:
        store.put_new(ANN, thing)
    await store.close()
    assert all(thing.is_closed for thing in things)
    assert names(store, ANN, "ab") == ""
