"""No collections while something starts, nor of what has started."""

import gc
import weakref

import pytest

from pagemill.utils.gc_pause import gc_paused


class Ring:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_it_was(freezing):
    yield
    gc.enable()


@pytest.mark.slow
def test_nothing_is_collected_in_the_body_nor_looked_at_afterwards():
    collections = [stats["collections"] for stats in gc.get_stats()]
    with gc_paused():
        kept = [Ring() for _ in range(5000)]
        ring = weakref.ref(Ring())
        assert [stats["collections"] for stats in gc.get_stats()] == collections
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)
    gc.collect()
    assert ring() is not None
    gc.unfreeze()
    gc.collect()
    assert ring() is None


def test_the_outer_one_ends_it():
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    frozen = gc.get_freeze_count()
    with gc_paused():
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() <= frozen, "some of them may have ended"


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="broken"), gc_paused():
        raise ValueError("broken")
    assert gc.isenabled()
