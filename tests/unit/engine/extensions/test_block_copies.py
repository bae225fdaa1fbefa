"""What the KV cache wants copied is said once, and not for a request that did not start."""

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.request import Request
from pagemill.messages.block_copies import BlockCopy
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from tests.fakes.engine_setup import core_request, full

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def begin(kv, name, tokens):
    request = Request(core_request(name, tokens), sequence=0, max_model_len=64)
    kv.begin_step()
    kv.begin(request, kv.cached_prefix(request), len(tokens))
    kv.commit(request, len(tokens))
    return request


def test_copies_are_taken_once_and_not_for_a_request_that_let_go():
    kv = KVCacheManager(KVCacheConfig(20, (KVCacheGroup(("layer",), full()),)), "sha256", partial_reuse=True)
    begin(kv, "a", TOKENS)
    begin(kv, "b", [*TOKENS[:7], 0])
    assert kv.take_copies() == [BlockCopy(2, 4)]
    assert kv.take_copies() == []
    failed = begin(kv, "c", [*TOKENS[:6], 0])
    kv.free(failed)
    begin(kv, "d", [*TOKENS[:7], 8])
    assert len(kv.take_copies()) == 1
