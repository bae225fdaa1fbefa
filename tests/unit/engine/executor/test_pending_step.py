import numpy as np
import pytest

from pagemill.engine.executor.pending_step import PendingStep
from pagemill.errors import EngineDeadError
from pagemill.messages.step import ModelRunnerOutput

OUTPUT = ModelRunnerOutput(3, np.zeros(1, np.int32), np.ones(1, np.int32))


def test_looking_does_not_wait_and_asking_does():
    asked = []

    def fetch(step, wait):
        asked.append(wait)
        if wait:
            step.set_result(OUTPUT)

    step = PendingStep(fetch)
    assert not step.ready()
    assert step.result() is OUTPUT
    assert step.ready()
    assert step.result() is OUTPUT
    assert asked == [False, True], "what was fetched is not fetched again"


def test_an_error_is_an_answer():
    step = PendingStep(lambda step, wait: step.set_error(EngineDeadError("worker 1 is gone")))
    assert step.ready()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="worker 1 is gone"):
            step.result()
