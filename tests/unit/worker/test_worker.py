"""A worker by itself: what holds while it loads."""

import gc

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.worker import worker as worker_module
from pagemill.worker.worker import Worker
from tests.fakes.tiny_checkpoint import make_checkpoint


def test_no_garbage_is_looked_for_while_weights_load(tmp_path, monkeypatch):
    """Whoever made the worker may have collections paused or not: in a process of its own it is told to load later."""
    enabled = []

    def load(*args):
        enabled.append(gc.isenabled())
        return load_model(*args)

    load_model = worker_module.load_model
    monkeypatch.setattr(worker_module, "load_model", load)
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    worker = Worker(build_config(EngineArgs(str(path), device="cpu", dtype="float32")))
    worker.load_model()
    assert enabled == [False]
    assert gc.isenabled()
    assert worker.model.vocab_size == 320
    worker.shutdown()


def test_collections_go_on_when_weights_cannot_be_loaded(tmp_path, monkeypatch):
    def load(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(worker_module, "load_model", load)
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    worker = Worker(build_config(EngineArgs(str(path), device="cpu", dtype="float32")))
    with pytest.raises(OSError, match="the disk is gone"):
        worker.load_model()
    assert gc.isenabled()


@pytest.mark.parametrize("num_seqs", [10**14, 10**30])
def test_more_requests_than_memory_can_hold_are_one_line(tmp_path, num_seqs):
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    config = build_config(EngineArgs(str(path), device="cpu", dtype="float32", max_num_seqs=num_seqs))
    with pytest.raises(ConfigError, match=rf"max_num_seqs={num_seqs} with max_model_len=512: there is no memory"):
        EngineCore(config, UniprocExecutor(Worker(config)))
