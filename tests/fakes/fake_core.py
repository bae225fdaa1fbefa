"""A `CoreApi` that answers every prompt with a script: no scheduler, no model, one token per request and step."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from pagemill.messages.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Finish,
    FinishReason,
)
from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.stats import SchedulerStats
from tests.fakes.fake_tokenizer import BOS, VOCAB_SIZE
from tests.fakes.narrow import pooling_of, sampling_of

Script = Callable[[EngineCoreRequest], Sequence[int]]


def echo(request: EngineCoreRequest) -> Sequence[int]:
    """The prompt once more, over and over."""
    ids = [token for token in request.prompt_token_ids if token != BOS]
    return ids * (1 + (sampling_of(request).max_tokens or 0) // len(ids))


def say(text: str, *more: int) -> Script:
    """Always the same answer; `more` are token ids after it."""
    return lambda request: [*text.encode(), *more]


def pools(request: EngineCoreRequest) -> bool:
    return isinstance(request.params, PoolingParams)


def vector_of(token_ids: Sequence[int], size: int = 8) -> np.ndarray:
    """What `FakeCore` makes of a prompt."""
    return np.array([(1 + sum(token_ids)) / (place + 1) for place in range(size)], np.float32)


def logprobs_of(token_ids: Sequence[int], num_candidates: int) -> TokenLogprobs:
    """What `FakeCore` says of tokens: -1.5 of a token, which is second, -0.5 of the one after it, which is first; then
    -2.5 and so on of those that follow."""
    ids = [[token, *((token + 1 + place) % VOCAB_SIZE for place in range(num_candidates))] for token in token_ids]
    values = [-1.5, -0.5, *(-1.5 - place for place in range(1, num_candidates))][: 1 + num_candidates]
    return TokenLogprobs(
        np.array(ids, np.int32).reshape(len(ids), 1 + num_candidates),
        np.array([values] * len(ids), np.float32).reshape(len(ids), 1 + num_candidates),
        np.full(len(ids), 2, np.int32),
    )


def scored(request: EngineCoreRequest, output: EngineCoreOutput, first: bool) -> EngineCoreOutput:
    """The output with the log-probabilities that the request asks for."""
    params = sampling_of(request)
    if params.num_candidates is not None and output.new_token_ids:
        found = logprobs_of(output.new_token_ids, params.num_candidates)
        output = msgspec.structs.replace(output, logprobs=found)
    if params.prompt_logprobs is not None and first:
        found = logprobs_of(request.prompt_token_ids[1:], params.prompt_logprobs)
        output = msgspec.structs.replace(output, prompt_logprobs=found)
    return output


def pooled(request: EngineCoreRequest) -> EngineCoreOutput:
    params = pooling_of(request)
    vector = vector_of(request.prompt_token_ids)[: params.dimensions]
    at = request.arrival_time
    return EngineCoreOutput(
        request_id=request.request_id,
        pooled=vector / np.linalg.norm(vector) if params.normalize else vector,
        finish=Finish(FinishReason.STOP),
        num_cached_tokens=1,
        queued_at=at,
        scheduled_at=at,
    )


class FakeCore:
    """Gives each request its script's tokens, one a step, until a stop token, max_tokens or the script's end.

    `step_s` makes each step last; `fail_after` steps, the core raises.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        max_model_len: int = 256,
        step_s: float = 0.0,
        fail_after: int | None = None,
        num_blocks: int = 64,
    ) -> None:
        self.ready = EngineReady(
            max_model_len=max_model_len, vocab_size=VOCAB_SIZE, num_blocks=num_blocks, block_size=16
        )
        self.script = script
        self.step_s = step_s
        self.fail_after = fail_after
        self.refuse = False
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.num_executed = 0
        self.is_shut_down = False
        self.threads: set[int] = set()
        self._running: dict[str, tuple[EngineCoreRequest, list[int], int]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        self._note_thread()
        if self.refuse:
            raise RuntimeError("refused at 0x7f00deadbeef")
        self.seen.append(request)
        self._running[request.request_id] = (request, [] if pools(request) else list(self.script(request)), 0)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._note_thread()
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._running)

    def only_waits(self) -> bool:
        return False

    def step(self) -> list[EngineCoreOutputs]:
        self._note_thread()
        self.num_steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail_after is not None and self.num_steps > self.fail_after:
            raise RuntimeError("the device fell off the bus at 0x7f00deadbeef")
        plain_ids: list[str] = []
        plain_tokens: list[int] = []
        outputs = []
        for request_id in [name for name, (request, _, _) in self._running.items() if pools(request)]:
            outputs.append(pooled(self._running.pop(request_id)[0]))
        for request_id, (request, answer, position) in list(self._running.items()):
            finish = self._finish(request, answer, position)
            if finish is None and position and sampling_of(request).num_candidates is None:
                plain_ids.append(request_id)
                plain_tokens.append(answer[position])
            else:
                cached = 2 if position == 0 else None
                output = EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[answer[position]] if sampling_of(request).max_tokens else [],
                    finish=finish,
                    num_cached_tokens=cached,
                    queued_at=request.arrival_time if position == 0 else None,
                    scheduled_at=request.arrival_time if position == 0 else None,
                )
                outputs.append(scored(request, output, position == 0))
            if finish is None:
                self._running[request_id] = (request, answer, position + 1)
            else:
                del self._running[request_id]
        num_tokens = len(plain_ids) + len(outputs)
        return [
            EngineCoreOutputs(
                request_ids=plain_ids,
                token_ids=plain_tokens,
                outputs=outputs,
                stats=self.stats(),
                step_at=time.monotonic(),
                num_step_tokens=num_tokens,
            )
        ]

    def execute_dummy_step(self) -> None:
        self._note_thread()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self._running))

    def call(self, name: str, *args: Any) -> Any:
        self._note_thread()
        if name == "collective_rpc":
            return msgspec.json.encode([list(args)]).decode()
        if name != "reset_prefix_cache":
            raise ValueError(f"unknown call {name}")
        return True

    def shutdown(self) -> None:
        self.is_shut_down = True

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _finish(self, request: EngineCoreRequest, answer: list[int], position: int) -> Finish | None:
        token = answer[position]
        params = sampling_of(request)
        if params.max_tokens == 0:
            return Finish(FinishReason.LENGTH)
        if token in (params.stop_token_ids or ()) and position >= params.min_tokens:
            return Finish(FinishReason.STOP, stop_token_id=token)
        if position + 1 in (params.max_tokens, len(answer)):
            return Finish(FinishReason.LENGTH)
        return None

    def _note_thread(self) -> None:
        self.threads.add(threading.get_ident())
