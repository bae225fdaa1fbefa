"""An `LLM` that cannot be built leaves nothing behind, wherever it fails: the next attempt finds what it found."""

import gc
import os
import threading
from pathlib import Path

import pytest

from pagemill import LLM
from pagemill.engine import core as core_module
from pagemill.engine.executor.multiproc import MultiprocExecutor
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.errors import ConfigError, ModelError
from pagemill.transport.kv_event_publisher import KVEventPublisher
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.slow

KINDS = {
    "uniproc": {},
    "overlap": {"async_scheduling": True},
    "pooling": {"runner": "pooling"},
    "tp": {"tensor_parallel_size": 2},
}
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:23511",
    "replay_endpoint": "tcp://127.0.0.1:23512",
}
SETTINGS = {"device": "cpu", "cpu_threads": 1, "cpu_threads_bind": "nobind", "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path_factory):
    """Where folders with sockets are made, which others use too otherwise."""
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path_factory.mktemp("rpc")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def held():
    """What a process holds of the machine: descriptors, threads, children, shared memory, sockets' files."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": names_in("/proc/self/fd"),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children,
        # The semaphores of other processes' locks are there for a moment only.
        "shared memory": [name for name in names_in("/dev/shm") if not name.startswith("sem.mp-")],
        "folders": names_in(os.environ["PAGEMILL_RPC_BASE_PATH"]),
    }


def fails(checkpoint, times=3, kind=ConfigError, words=None, **settings):
    """As often as `times`, and what is held afterwards is what was held before."""
    before = held()
    for _ in range(times):
        with pytest.raises(kind, match=words):
            LLM(str(checkpoint), **(SETTINGS | settings))
        assert held() == before


@pytest.fixture(scope="module")
def warm():
    """Kinds of which one was started."""
    return set()


@pytest.fixture(params=KINDS)
def kind(request, checkpoint, base, warm):
    """Settings of one kind of engine, after one that works has loaded and started what stays for good."""
    settings = KINDS[request.param]
    if request.param not in warm:
        with LLM(str(checkpoint), **(SETTINGS | settings)) as llm:
            works(llm, settings)
        warm.add(request.param)
    return settings


def works(llm, settings):
    if "runner" in settings:
        assert len(llm.embed(["hello"], use_tqdm=False)[0].outputs.embedding) == 64
    else:
        assert llm.generate(["hello"], use_tqdm=False)[0].finished


PHASES = [
    ("specs", UniprocExecutor, MultiprocExecutor, "kv_cache_specs"),
    ("bytes", UniprocExecutor, MultiprocExecutor, "available_kv_bytes"),
    ("cache", UniprocExecutor, MultiprocExecutor, "initialize_kv_cache"),
    ("manager", KVCacheManager, KVCacheManager, "__init__"),
    ("scheduler", Scheduler, Scheduler, "__init__"),
]


def test_wherever_it_fails(checkpoint, kind, monkeypatch):
    several = "tensor_parallel_size" in kind
    for name, alone, together, method in PHASES[2:3] if several else PHASES:
        with monkeypatch.context() as patched:
            patched.setattr(together if several else alone, method, raising(name))
            fails(checkpoint, 1 if several or name != "cache" else 3, words=f"injected: {name}", **kind)
    with monkeypatch.context() as patched:
        patched.setattr(core_module, "_event_sink", raising("events"))
        fails(checkpoint, 1, words="injected: events", **kind)
    with monkeypatch.context() as patched:
        patched.setattr("pagemill.launch.AsyncLLM", raising("front end"))
        fails(checkpoint, 1, words="injected: front end", **kind)
    for error in (KeyboardInterrupt,) if several else (KeyboardInterrupt, MemoryError):
        with monkeypatch.context() as patched:
            patched.setattr("pagemill.launch.tokenizer_of", raising("tokenizer", error))
            fails(checkpoint, 1, error, **kind)
    with LLM(str(checkpoint), **(SETTINGS | kind)) as llm:
        works(llm, kind)


def raising(words, kind=ConfigError):
    def fail(*args, **kwargs):
        raise kind(f"injected: {words}")

    return fail


def test_real_causes(checkpoint, kind):
    several = "tensor_parallel_size" in kind
    times = 1 if several else 2
    fails(checkpoint, times, words="needs 9 KV cache blocks", num_gpu_blocks_override=2, **kind)
    replay = EVENTS | {"replay_endpoint": "tcp://1.2.3.4:1"}
    fails(checkpoint, times, words="cannot be used", kv_events_config=replay, **kind)
    if several:  # starts of seconds each; what is left to show has nothing to do with the number of workers
        return
    fails(checkpoint, times, ModelError, "cannot be read", chat_template="/nonexistent", **kind)
    fails(checkpoint, times, words="cannot be used", kv_events_config=EVENTS | {"endpoint": "tcp://1.2.3.4:1"}, **kind)
    with LLM(str(checkpoint), kv_events_config=EVENTS, **(SETTINGS | kind)) as llm:
        works(llm, kind)


def test_weights_that_cannot_be_loaded(tmp_path, checkpoint, kind):
    """Found by the workers, on their side."""
    damaged = make_checkpoint(tmp_path / "damaged", "LlamaForCausalLM")
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    fails(damaged, 1, ModelError, **kind)


def test_the_publisher_of_events_gives_everything_back(monkeypatch, checkpoint):
    with LLM(str(checkpoint), kv_events_config=EVENTS, **SETTINGS) as llm:
        works(llm, {})
    monkeypatch.setattr(KVEventPublisher, "_open", opens_one(KVEventPublisher._open))
    fails(checkpoint, 2, OSError, "injected: replay_endpoint", kv_events_config=EVENTS)


def opens_one(really):
    def opens(self, name, *args):
        if name != "endpoint":
            raise OSError(f"injected: {name}")
        return really(self, name, *args)

    return opens
