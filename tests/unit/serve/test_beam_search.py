"""A beam search in front of an engine that is scripted: what it asks of the engine, step by step."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from pagemill.errors import PagemillError
from pagemill.messages.beam_search import BeamSearchParams
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.outputs import CompletionOutput, Logprob, RequestOutput
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.beam_search import search
from pagemill.serve.processing.input_processor import PreparedRequest

END = 9


class ScriptedEngine:
    """After every token, 5 is likelier than 6, and then comes the end. Fails in one step, if told to."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.steps: list[list[EngineCoreRequest]] = []
        self.limited: list[bool] = []
        self.num_closed = 0
        self._fails_in = fails_in

    async def stream(
        self, requests: Sequence[PreparedRequest], request_ids: Sequence[str], *, limited: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        self.steps.append([item.request for item in requests])
        self.limited.append(limited)
        candidates = {5: Logprob(-0.5), 6: Logprob(-1.0), END: Logprob(-2.0)}
        try:
            for name in reversed(request_ids):  # in any order
                completion = CompletionOutput(0, "", [5], "length", logprobs=[candidates])
                if len(self.steps) == self._fails_in:
                    completion = CompletionOutput(0, "", [], "error", error="NaN")
                yield RequestOutput(name, None, [], [completion], True)
        finally:
            self.num_closed += 1


def prepared() -> PreparedRequest:
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), arrival_time=0.0)
    return PreparedRequest(None, request)


async def test_each_step_asks_for_one_token_after_every_beam() -> None:
    engine = ScriptedEngine()
    found = await search(engine, prepared(), BeamSearchParams(beam_width=2, max_tokens=3), [END])
    assert [[item.prompt_token_ids for item in step] for step in engine.steps[:2]] == [
        [[1, 2]],
        [[1, 2, 5], [1, 2, 6]],
    ]
    assert found.sequences[0].tokens == [1, 2, 5, 5, 5]
    assert engine.limited == [True, False, False]
    ids = [item.request_id for step in engine.steps for item in step]
    assert len(set(ids)) == len(ids) == 5
    params = [item.params for step in engine.steps for item in step]
    assert all(isinstance(one, SamplingParams) and (one.max_tokens, one.logprobs) == (1, 3) for one in params)


async def test_a_step_has_waited_only_since_it_was_asked_for() -> None:
    """Not since the search began: latencies that are counted by step would grow with its length."""
    engine = ScriptedEngine()
    await search(engine, prepared(), BeamSearchParams(beam_width=2, max_tokens=3), [END])
    first, second, third = ([item.arrival_time for item in step] for step in engine.steps)
    assert first == [0.0]
    assert 0.0 < second[0] == second[1] < third[0]


async def test_a_step_that_fails_ends_the_search() -> None:
    engine = ScriptedEngine(fails_in=2)
    with pytest.raises(PagemillError, match="NaN"):
        await search(engine, prepared(), BeamSearchParams(beam_width=2, max_tokens=3), [END])
    assert engine.num_closed == len(engine.steps) == 2
