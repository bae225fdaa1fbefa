"""The workers' halves of step extensions: when they are told, what goes with the tokens, on every path of a step."""

import numpy as np
import pytest

from pagemill.catalog.step_extensions import STEP_EXTENSIONS
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.engine.extensions.interface import EngineExtension
from pagemill.launch import build_config
from pagemill.messages.extensions import StepExtension
from pagemill.messages.pending import Ready
from pagemill.worker.extensions.host import WorkerExtensions
from pagemill.worker.extensions.interface import WorkerExtension
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.cases(one_in=3)

ANSWERS = []


class Counter(EngineExtension):
    """Numbers the steps, as many as there are."""

    def __init__(self, context):
        ANSWERS.clear()

    def payload(self, step, sampled):
        return step.step_id

    def joins_every_step(self, slots):
        return True

    def receive(self, answer, slots, live):
        ANSWERS.append((answer, len(slots)))


class Echo(WorkerExtension):
    """Answers with the number that it was told last, and the slots that sampled."""

    def __init__(self, context):
        self.context = context
        self.told = None

    def begin(self, payload):
        self.told = payload

    def answer(self, slots):
        told, self.told = self.told, None
        return None if told is None else Ready((told, len(slots)))


ECHO = StepExtension(engine=f"{__name__}:Counter", worker=f"{__name__}:Echo", payload=int, answer=tuple)


@pytest.fixture
def echo():
    STEP_EXTENSIONS.add("echo", f"{__name__}:ECHO")
    yield
    STEP_EXTENSIONS.remove("echo")


@pytest.mark.parametrize(
    ("platform", "dtype"), [(None, "float32"), (None, "bfloat16"), (QueuedPlatform, "float32")], ids=str
)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_answered_with_its_tokens(tmp_path, echo, platform, dtype, depth):
    """In bfloat16 most steps on the host are one native call; the other platform runs ahead."""
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    settings = {"max_model_len": 96, "num_gpu_blocks_override": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    config = build_config(EngineArgs(str(path), device="cpu", dtype=dtype, **settings))
    worker = Worker(config, platform=platform and platform())
    client = Client(EngineCore(config, UniprocExecutor(worker), depth=depth))
    client.add(*(core_request(name, length, max_tokens=12) for name, length in {"a": 5, "b": 40}.items()))
    client.run()
    assert {name: len(tokens) for name, tokens in client.tokens.items()} == {"a": 12, "b": 12}
    told = [step_id for (step_id, _), _ in ANSWERS]
    assert told == list(range(len(told)))
    assert all(sampled == count for (_, sampled), count in ANSWERS)
    assert len(told) > 12
    client.core.shutdown()


def test_nothing_is_kept_where_nothing_is_answered():
    quiet = Echo(None)
    extensions = WorkerExtensions({"quiet": quiet, "silent": Echo(None)}, ("quiet",))
    slots = np.arange(2, dtype=np.int32)
    assert extensions.answers(slots) is None
    extensions.begin({"quiet": 3})
    answers = extensions.answers(slots)
    assert answers.ready()
    assert answers.result() == {"quiet": (3, 2)}
    assert WorkerExtensions().answers(slots) is None
