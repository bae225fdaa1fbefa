"""Beam search in front of an engine that knows nothing of it: each step asks for the next token of every beam, as a
request for one token with its most likely candidates.

The prefix cache has what the beams share with each other and with the steps before, so a step computes little more than
one block of each. Sequences and scores are those of transformers: see `search`.
"""

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from pagemill.errors import PagemillError
from pagemill.messages.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagemill.messages.outputs import RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.serve.processing.input_processor import PreparedRequest


class Beam(NamedTuple):
    """A sequence that may be continued."""

    tokens: list[int]
    """Of the output."""
    logprob: float
    """Sum of their log-probabilities."""

    def score(self, length_penalty: float) -> float:
        """What sequences are compared by."""
        return float(self.logprob / len(self.tokens) ** length_penalty)


class Candidates(NamedTuple):
    """What may follow a beam."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class BeamSearch:
    """The state of one search: beams that go on, and the best that have ended.

    A step takes the candidates of all beams in the order of their log-probability. The best `beam_width` of those that
    do not end go on; those that end are kept if they are among the best `beam_width` of all, and are among the best
    scores of all that ended. The search ends when no running beam scores more than the worst that is kept.
    """

    def __init__(self, params: BeamSearchParams, end_token_ids: Collection[int]) -> None:
        self._params = params
        self._ends = frozenset(() if params.ignore_eos else end_token_ids)
        self.num_candidates = params.beam_width + len(self._ends)
        """Candidates of each beam that a step needs: enough for `beam_width` that do not end."""
        self.running = [Beam([], 0.0)]
        self.ended: list[Beam] = []
        """Best score first."""

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Continue the running beams with their candidates."""
        width, penalty = self._params.beam_width, self._params.length_penalty
        found = [
            Beam([*beam.tokens, token], beam.logprob + logprob)
            for beam, some in zip(self.running, candidates, strict=True)
            for token, logprob in zip(some.token_ids, some.logprobs, strict=True)
        ]
        found.sort(key=lambda beam: -beam.logprob)
        ended = [beam for beam in found[:width] if self._has_ended(beam)]
        self.ended = sorted([*self.ended, *ended], key=lambda beam: -beam.score(penalty))[:width]
        self.running = [beam for beam in found if not self._has_ended(beam)][:width]
        full = len(self.ended) == width
        if full and self.running and self.running[0].score(penalty) <= self.ended[-1].score(penalty):
            self.running = []

    def ends_with(self, beam: Beam) -> int | None:
        """The end-of-sequence token of a beam that has one."""
        return beam.tokens[-1] if beam.tokens[-1] in self._ends else None

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends or len(beam.tokens) >= self._params.max_tokens


class Engine(Protocol):
    """What a search asks of `AsyncLLM`."""

    def stream(
        self, requests: Sequence[PreparedRequest], request_ids: Sequence[str], *, limited: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run requests, and yield their outputs under `request_ids`; `limited`: as `AsyncLLM.stream` says."""


def first_params(params: BeamSearchParams, end_token_ids: Collection[int]) -> SamplingParams:
    """With which the prompt of a search is prepared: all that it needs has room and is allowed."""
    return SamplingParams(
        temperature=0, max_tokens=params.max_tokens, logprobs=BeamSearch(params, end_token_ids).num_candidates
    )


async def search(
    engine: Engine, prepared: PreparedRequest, params: BeamSearchParams, end_token_ids: Collection[int]
) -> BeamSearchOutput:
    """The best sequences for a prompt that was prepared with `first_params`, by their score; without text. The first
    step keeps to the limits of the deployment. Raises PagemillError when the engine cannot complete a step."""
    state = BeamSearch(params, end_token_ids)
    request = prepared.request
    prompt_ids = request.prompt_token_ids
    output = BeamSearchOutput(num_prompt_tokens=len(prompt_ids))
    one = SamplingParams(
        temperature=0,
        max_tokens=1,
        seed=0,
        logprobs=state.num_candidates,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number in itertools.count():
        now = time.monotonic()  # a step waits from now on, not since the search began
        steps = [
            msgspec.structs.replace(
                request,
                arrival_time=now if number else request.arrival_time,
                request_id=f"{request.request_id}-{number}-{index}",
                prompt_token_ids=[*prompt_ids, *beam.tokens],
                params=one,
            )
            for index, beam in enumerate(state.running)
        ]
        answers = await _answers(engine, [PreparedRequest(None, step) for step in steps], limited=number == 0)
        output.num_cached_tokens += sum(answer.num_cached_tokens for answer in answers)
        if number == 0:
            output.num_cached_prompt_tokens = output.num_cached_tokens
        state.advance([_candidates(answer, state.num_candidates) for answer in answers])
        if not state.running:
            break
    for beam in state.ended:
        end = state.ends_with(beam)
        output.sequences.append(
            BeamSearchSequence(
                tokens=[*prompt_ids, *beam.tokens],
                cum_logprob=beam.logprob,
                score=beam.score(params.length_penalty),
                finish_reason="length" if end is None else "stop",
            )
        )
    return output


async def _answers(engine: Engine, requests: Sequence[PreparedRequest], limited: bool) -> list[RequestOutput]:
    """In the order of the requests."""
    found: dict[str, RequestOutput] = {}
    names = [item.request.request_id for item in requests]
    async with contextlib.aclosing(engine.stream(requests, names, limited=limited)) as outputs:
        async for answer in outputs:
            found[answer.request_id] = answer
    return [found[name] for name in names]


def _candidates(answer: RequestOutput, count: int) -> Candidates:
    (completion,) = answer.outputs
    if completion.finish_reason == "error" or not completion.logprobs:
        raise PagemillError(completion.error or f"a step of the beam search ended: {completion.finish_reason}")
    ranked = sorted(completion.logprobs[0].items(), key=lambda item: -item[1].logprob)[:count]
    return Candidates([token for token, _ in ranked], [value.logprob for _, value in ranked])
