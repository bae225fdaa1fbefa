import dataclasses

import msgspec
import pytest

from pagemill.catalog.registry import load_path
from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError
from pagemill.launch import WORKER, build_config
from pagemill.messages.worker_rank import SOLO_RANK
from pagemill.worker import begin
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint


@pytest.fixture
def prepared(monkeypatch):
    """The ranks for which a platform was asked to get ready."""
    ranks = []

    class Platform(QueuedPlatform):
        def prepare(self, local_rank):
            ranks.append(local_rank)

    monkeypatch.setattr(begin, "choose_platform", lambda device: Platform())
    return ranks


def test_the_device_of_a_worker_is_got_ready_and_used(prepared, tmp_path):
    config = build_config(EngineArgs(str(make_checkpoint(tmp_path, "LlamaForCausalLM")), device="cpu"))
    make = load_path("worker", WORKER)
    worker = make(config, msgspec.structs.replace(SOLO_RANK, local_rank=3))
    assert prepared == [3]
    assert worker.runs_ahead  # as the platform that was got ready does, and CPUs do not
    assert make(config).runs_ahead and prepared == [3, 0]


def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch):
    config = build_config(EngineArgs(str(make_checkpoint(tmp_path, "LlamaForCausalLM")), device="cpu"))
    absent = dataclasses.replace(config, device=dataclasses.replace(config.device, device="cuda"))
    monkeypatch.setattr("pagemill.platforms.cuda._torch_has_cuda", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda' cannot be used: this torch is built without CUDA"):
        begin.make_worker(absent)
