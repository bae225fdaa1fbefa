"""A class of somebody's own proposes, named by its path: as proposers of plug-ins do."""

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from pagemill.launch import build_config
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import TEXTS

PROMPT = [5, 6, 7]
SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


def run(checkpoint, **given):
    config = build_config(EngineArgs(checkpoint, **SETTINGS, **given))
    core = EngineCore(config, UniprocExecutor(Worker(config)), depth=1)
    client = Client(core)
    client.add(core_request("a", PROMPT, max_tokens=30, temperature=0.0))
    while core.has_work():
        client.step()
    drafts = core.stats().drafts
    core.shutdown()
    return client.tokens["a"], drafts


@pytest.mark.parametrize("path", ["tests.fakes.toy_proposer:Toy", "tests.fakes.toy_proposer.Toy"])
def test_it_proposes(checkpoint, path):
    plain, _ = run(checkpoint)
    TEXTS[:] = [[*PROMPT, *plain]]
    try:
        tokens, drafts = run(
            checkpoint, speculative_config={"method": "custom_class", "model": path, "adaptive": False}
        )
    finally:
        TEXTS.clear()
    assert tokens == plain
    assert drafts.num_accepted_tokens > 10


REFUSED = [
    (None, "method='custom_class' needs model"),
    ("tests.fakes.toy_proposer:Nobody", "proposer 'tests.fakes.toy_proposer:Nobody' cannot be found"),
    ("nothing", "proposer ':nothing' cannot be found"),
    ("tests.fakes.toy_proposer:TEXTS", "'tests.fakes.toy_proposer:TEXTS' is no Proposer"),
]


@pytest.mark.parametrize(("path", "message"), REFUSED)
def test_what_is_none_is_refused(checkpoint, path, message):
    with pytest.raises(ConfigError, match=message):
        run(checkpoint, speculative_config={"method": "custom_class"} | ({"model": path} if path else {}))
