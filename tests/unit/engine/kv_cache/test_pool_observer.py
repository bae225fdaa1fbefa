"""An observer of a pool that adds itself to a manager, as a connector or an offloading tier would."""

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.pool_observer import PoolObserver
from pagemill.engine.request import Request
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.fakes.engine_setup import core_request, full


class Recorder(PoolObserver):
    def __init__(self):
        self.lines = []

    def taken(self, blocks):
        self.lines.append(("taken", list(blocks)))

    def used(self, blocks):
        self.lines.append(("used", list(blocks)))

    def released(self, blocks):
        self.lines.append(("released", list(blocks)))

    def stored(self, key, block):
        self.lines.append(("stored", key, block))

    def removed(self, key, block):
        self.lines.append(("removed", key, block))

    def cleared(self):
        self.lines.append(("cleared",))


class OnlyStored(PoolObserver):
    def __init__(self):
        self.keys = []

    def stored(self, key, block):
        self.keys.append(key)


def test_everything_that_happens_is_told_in_order():
    recorder, keys = Recorder(), OnlyStored()
    pool = BlockPool(3, [recorder, keys])
    first, second = pool.allocate(2)
    pool.commit(first, b"a")
    pool.commit(second, b"a")  # found by that key already
    pool.free([first, second])
    pool.touch([first])
    pool.free([first])
    pool.allocate(2)
    pool.commit(second, b"b")
    pool.forget_all()
    assert recorder.lines == [
        ("taken", [first, second]),
        ("stored", b"a", first),
        ("released", [first, second]),
        ("used", [first]),
        ("released", [first]),
        ("removed", b"a", first),
        ("taken", [second, first]),
        ("stored", b"b", second),
        ("cleared",),
    ]
    assert keys.keys == [b"a", b"b"]
    pool.check_integrity()


def test_a_manager_tells_observers_of_its_own():
    recorder = Recorder()
    config = KVCacheConfig(10, (KVCacheGroup(("layer",), full()),))
    kv = KVCacheManager(config, "sha256", observers=[recorder])
    request = Request(core_request("a", list(range(9))), sequence=0, max_model_len=100)
    kv.begin(request, kv.cached_prefix(request), 9)
    kv.commit(request, 9)
    kv.free(request, 9)
    assert [line[0] for line in recorder.lines] == ["used", "taken", "stored", "stored", "released"]
    assert kv.reset()
    assert recorder.lines[-1] == ("cleared",)
