"""`PoolingWorker`: a scripted worker whose vectors depend, as its tokens do, on all that was cached."""

from collections.abc import Sequence

import numpy as np

from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from tests.fakes.scripted_worker import ScriptedWorker, history, sampled

SIZE = 4


def vector_alone(prompt: Sequence[int], dimensions: int = SIZE, vocab_size: int = 13) -> list[float]:
    """What a prompt must become, computed without batches, blocks or steps."""
    number = sampled([history(prompt)], 0, vocab_size)
    return [float(number + place) for place in range(dimensions)]


class PoolingWorker(ScriptedWorker):
    """Vectors of SIZE numbers. Prompts of which all tokens are read must be computed from their beginning."""

    def execute_model(self, step: SchedulerOutput) -> None:
        for new in step.new:
            assert isinstance(new.params, PoolingParams)
            assert not (new.params.reads_all_tokens and new.num_computed_tokens), "hidden states that nobody keeps"
        super().execute_model(step)
        output = self.results.pop()
        vectors = np.array([[float(token + place) for place in range(SIZE)] for token in output.token_ids], np.float32)
        zeros = np.zeros_like(output.token_ids)
        some = vectors if len(vectors) else None
        self.results.append(ModelRunnerOutput(output.step_id, output.slots, zeros, some))
