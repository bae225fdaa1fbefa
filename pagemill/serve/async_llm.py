"""`AsyncLLM`: prompts in, streams of `RequestOutput` out, for any number of callers on one event loop.
Does not know HTTP, and reaches the engine through an `EngineClient` only."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerConfig
from pagemill.config.sections import CacheConfig, SchedulerConfig
from pagemill.errors import EngineDeadError, UnavailableError
from pagemill.messages.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagemill.messages.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import SamplingParams
from pagemill.observability.serving_metrics import ServingMetrics
from pagemill.serve.beam_search import first_params, search
from pagemill.serve.chat_renderer import ChatOptions
from pagemill.serve.client.control import EngineControl
from pagemill.serve.client.interface import EngineClient
from pagemill.serve.engine_calls import EngineCalls
from pagemill.serve.load_gate import LoadGate, LoadLimits, LoadTable
from pagemill.serve.other_arguments import refuse_others
from pagemill.serve.output_pump import OutputPump
from pagemill.serve.preparation import Preparation
from pagemill.serve.processing.forms import FormChecks
from pagemill.serve.processing.input_processor import PreparedRequest, RequestOptions
from pagemill.serve.processing.logprobs import TokenTexts
from pagemill.serve.processing.long_texts import parts_of
from pagemill.serve.processing.output_processor import OutputProcessor
from pagemill.serve.processing.parallel_sampling import fan_out
from pagemill.serve.processing.request_metrics import NoMetrics, RequestMetrics
from pagemill.serve.processing.request_stream import OutputQueue, PoolingStream, RequestStream, Sink, Stream
from pagemill.serve.processing.seeds import RequestSeeds
from pagemill.tokenizers.interface import Tokenizer
from pagemill.transport.shm_load import Load
from pagemill.utils.pacer import Pacer

LONG_TEXT_CHARS = 16_384
"""Texts from this length on are tokenized off the event loop's thread."""
DEFAULT_OPTIONS = RequestOptions()
Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class AsyncLLM(EngineCalls):
    """The front end of one engine. Used from one event loop.

    `scheduler` is the section the engine runs with (its policy and queue limits); `facts` have the model's recommended
    sampling values.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        scheduler: SchedulerConfig,
        *,
        cache: CacheConfig,
        served_model_name: str | None = None,
        log_interval_s: float | None = None,
        pooler: PoolerConfig | None = None,
        seeds: RequestSeeds | None = None,
        log_stats: bool = True,
    ) -> None:
        """`served_model_name` is what metrics call the model (default: its public name). While there is work, a
        line of figures is logged every `log_interval_s` seconds; None: never. `pooler`: of an engine that makes
        vectors and no text. `seeds`: for requests that have none. `log_stats`: False: nothing is counted, `metrics` are
        empty, and no line is logged."""
        self.tokenizer = tokenizer
        self.facts = facts
        self.max_model_len = client.ready.max_model_len
        self.block_size = client.ready.block_size
        """Tokens of a block of the prefix cache."""
        self.num_slots = scheduler.max_num_seqs * client.num_engines
        """Requests that may run at once, in all engines."""
        self.control = EngineControl(client)
        self._client = client
        self.preparation = Preparation(tokenizer, facts, client.ready, scheduler, pooler, client.num_engines)
        self.default_params = self.preparation.default_params
        self._inputs = self.preparation.inputs
        self._seeds = seeds or RequestSeeds()
        self.metrics = ServingMetrics(
            served_model_name or facts.public_name,
            self.max_model_len,
            _plain_settings(cache) | {"num_gpu_blocks": client.ready.num_blocks},
            client.stats,
            with_residency=cache.kv_cache_metrics,
            enabled=log_stats,
        )
        observer = RequestMetrics(self.metrics) if log_stats else NoMetrics()
        self._outputs = OutputProcessor(self._inputs.is_end_of_sequence, observer)
        self._pump = OutputPump(client, self._outputs, self.metrics, log_interval_s if log_stats else None)
        limits = LoadLimits.of(scheduler, client.num_engines)
        self._grammars = FormChecks(
            tokenizer,
            client.ready.vocab_size,
            (*facts.eos_token_ids, *tokenizer.eos_token_ids),
            client.ready.forms.backend,
        )
        self.load_limits = limits
        """How much may run and wait in all front ends of the engine."""
        self.gate = LoadGate(limits, self._outputs, self.metrics)
        """Says whether new requests are taken."""
        self._texts = TokenTexts(tokenizer)
        self._step_tokens = scheduler.max_num_batched_tokens
        self._count = itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, until it is finished. Closing the generator, or cancelling its task, aborts it.
        `others`: arguments of vLLM that have no counterpart, with values that ask for nothing (other_arguments.py).

        Raises RequestError, EngineOverloadedError, EngineDeadError, all at the first iteration or later.
        """
        refuse_others("AsyncLLM.generate", others)
        options = RequestOptions(priority=priority, cache_salt=cache_salt)
        prepared = await self.prepare(prompt, sampling_params or self.default_params, options)
        ids = [request_id] if request_id else None
        async with contextlib.aclosing(self.stream([prepared], ids, limited=True)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The one output of a pooling request: a vector. Closing the generator, or cancelling its task, aborts it.
        `others`: as of `generate`.

        Raises RequestError (also when the engine generates text), EngineOverloadedError, EngineDeadError, all at the
        first iteration or later.
        """
        refuse_others("AsyncLLM.encode", others)
        options = RequestOptions(priority=priority, cache_salt=cache_salt)
        prepared = await self.prepare(prompt, pooling_params or PoolingParams(), options)
        ids = [request_id] if request_id else None
        async with contextlib.aclosing(self.pool([prepared], ids, limited=True)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> PreparedRequest:
        """Tokenize and check a request without starting it. Raises RequestError."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._inputs.prepare, prompt, params, options)
        return self._inputs.prepare(prompt, params, options)

    def stream(
        self,
        requests: Sequence[PreparedRequest],
        request_ids: Sequence[str] | None = None,
        sink: Sink[RequestOutput] | None = None,
        *,
        limited: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of several requests as they come, until all are finished. Closing the generator aborts the rest.

        `request_ids` are what the outputs are called, one per request. Outputs that end nothing may be pushed to `sink`
        instead of coming here, while they are waited for here. Raises EngineDeadError; with `limited`, as `check_load`
        does when there is no room for all of them.
        """

        def text(name: str, prepared: PreparedRequest, rank: int, queue: OutputQueue[RequestOutput]) -> RequestStream:
            children = fan_out(self._seeds.complete(prepared.request), rank)
            return RequestStream(name, prepared.prompt, children, self.tokenizer, queue, self._texts)

        return self._run(text, requests, request_ids, limited, sink)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> BeamSearchOutput:
        """The sequences that a beam search finds, best first. Cancelling it ends it. Raises RequestError, and
        PagemillError when the engine cannot complete it."""
        ends = self._inputs.end_token_ids
        first = first_params(params, ends)
        self.preparation.check_beams(params.beam_width, first.logprobs or 0)
        prepared = await self.prepare(prompt, first, options)
        output = await search(self, prepared, params, ends)
        for sequence in output.sequences:
            sequence.text = self.tokenizer.decode(_shown_tokens(sequence, params))
        return output

    async def beam_outputs(
        self, requests: Sequence[PreparedRequest], request_ids: Sequence[str], params: BeamSearchParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for prompts that were prepared so, one after the other, with a completion for each sequence."""
        for name, prepared in zip(request_ids, requests, strict=True):
            ids = prepared.request.prompt_token_ids
            first = prepared.request.params
            limited = params
            if isinstance(first, SamplingParams) and first.max_tokens is not None:
                limited = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, first.max_tokens))
            found = await search(self, prepared, limited, self._inputs.end_token_ids)
            completions = []
            for index, sequence in enumerate(found.sequences):
                decoder = self.tokenizer.incremental(ids, True)
                text = decoder.step(_shown_tokens(sequence, params)[len(ids) :]) + decoder.flush()
                completions.append(
                    CompletionOutput(
                        index,
                        text,
                        sequence.tokens[len(ids) :],
                        sequence.finish_reason,
                        cumulative_logprob=sequence.cum_logprob,
                    )
                )
            yield RequestOutput(name, prepared.prompt, ids, completions, True, found.num_cached_prompt_tokens)

    def pool(
        self, requests: Sequence[PreparedRequest], request_ids: Sequence[str] | None = None, *, limited: bool = False
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """`stream`, for pooling requests: one output of each, as they come."""

        def vector(
            name: str, prepared: PreparedRequest, rank: int, queue: OutputQueue[PoolingRequestOutput]
        ) -> PoolingStream:
            (whole,) = fan_out(prepared.request, rank)
            return PoolingStream(name, prepared.prompt, whole, parts_of(whole, self._inputs.max_model_len), queue)

        return self._run(vector, requests, request_ids, limited)

    async def _run(
        self,
        make_stream: Callable[[str, PreparedRequest, int, OutputQueue[Output]], Stream[Output]],
        requests: Sequence[PreparedRequest],
        request_ids: Sequence[str] | None,
        limited: bool,
        sink: Sink[Output] | None = None,
    ) -> AsyncGenerator[Output, None]:
        self._pump.check_alive()
        await self._grammars.check(prepared.request for prepared in requests)
        external_ids = request_ids or [f"request-{next(self._count)}" for _ in requests]
        queue: OutputQueue[Output] = OutputQueue(sink)
        streams: list[Stream[Output]] = []
        num_added = 0
        num_tokens = 0
        begun = False
        pacer = Pacer()
        try:
            with self.gate.reserve(_load_of(requests), limited) as reservation:
                for external_id, prepared in zip(external_ids, requests, strict=True):
                    stream = make_stream(external_id, prepared, num_added, queue)
                    streams.append(stream)
                    reservation.use(len(stream.children), stream.num_queued_tokens)
                    self._outputs.add(stream)
                    # Looked at one by one: some may be aborted while others are sent.
                    for child in (child for child in stream.children if child.request_id in self._outputs):
                        await self._client.add(child)
                        await pacer.pause()
                    num_added += len(stream.children)
                    num_tokens += len(prepared.request.prompt_token_ids) * len(stream.children)
                    if not begun and num_tokens >= self._step_tokens:
                        # Enough for a step, which may begin while the others are added. Once: the next has them all.
                        begun = True
                        self._pump.start()
                        await asyncio.sleep(0)
                        pacer = Pacer()  # the turn of the others may have been a step, and this one begins
            self._pump.start()
            num_open = len(streams)
            while num_open:
                output = await queue.get()
                num_open -= output.finished
                yield output
        finally:
            await self._forget(streams)

    async def _forget(self, streams: list[Stream[Output]]) -> None:
        """Nobody waits for these any more; what the engine still runs of them is aborted."""
        unfinished: list[str] = []
        pacer = Pacer()
        try:
            for stream in streams:
                if stream.finished:
                    stream.release()  # nobody takes what is left of it
                else:
                    unfinished += self._outputs.discard([stream])
                await pacer.pause()
        finally:  # all of them, also when this is cancelled
            unfinished += self._outputs.discard(stream for stream in streams if not stream.finished)
            if unfinished:
                await self._client.abort(unfinished)

    def share_load(self, table: LoadTable) -> None:
        """Count what is in flight together with the other front ends of the engine. Called before the first request."""
        self.gate.share(table)

    def check_load(self) -> None:
        """Raises EngineOverloadedError when as many requests run and wait, in all front ends of the engine, as the
        configuration allows; UnavailableError after `drain`, EngineDeadError when the engine is gone."""
        self._pump.check_alive()
        self.gate.check()

    def render_chat(self, messages: Any, options: ChatOptions) -> str:
        """A conversation as the text of a prompt, special tokens included, for `prepare` with
        `RequestOptions(rendered=True)`. Raises RequestError."""
        return self.preparation.chats.render(messages, options)

    async def abort(self, request_id: str | Iterable[str] | None) -> None:
        """End the requests that were given this id, or one of these, or all (None); their consumers get what there is,
        with the reason abort."""
        names = [request_id] if request_id is None or isinstance(request_id, str) else request_id
        aborted = [child for name in names for child in self._outputs.abort(name)]
        if aborted:
            await self._client.abort(aborted)

    async def reset_prefix_cache(self, **others: Any) -> bool:
        """Forget cached prefixes. False when blocks are in use and nothing was done. `others`: as of `generate`."""
        refuse_others("AsyncLLM.reset_prefix_cache", others)
        return bool(await self._client.call("reset_prefix_cache"))

    @property
    def errored(self) -> bool:
        """Whether the engine is gone."""
        return self._pump.error is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine is there."""
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine is gone."""
        return self._pump.error or EngineDeadError("the engine is alive")

    @property
    def num_in_flight(self) -> int:
        """Completions that run or wait."""
        return self._outputs.num_in_flight

    def load(self) -> Load:
        """What runs and waits in all front ends of the engine, as far as this process can see."""
        return self.gate.total()

    def drain(self) -> None:
        """From now on, `check_load` refuses new requests; those in flight go on."""
        self.gate.drain()

    def give_up(self) -> None:
        """End all requests in flight with UnavailableError."""
        self._outputs.fail_all(UnavailableError("the server shut down before the request was finished"))

    def problem(self) -> str | None:
        """What keeps requests from being worked on as they should; None when nothing does. Never waits."""
        return self._client.problem() if self._pump.error is None else str(self._pump.error)

    def accepts(self) -> bool:
        """Whether a new request would be taken and worked on now."""
        return not self.errored and not (self.gate.draining or self.gate.holds_off) and self._client.accepts()

    async def shutdown(self) -> None:
        """End all requests with EngineDeadError and stop the engine. A second call does nothing."""
        self._grammars.close()
        await self._pump.stop(EngineDeadError("the engine was shut down"))
        await self._client.close()


def _shown_tokens(sequence: BeamSearchSequence, params: BeamSearchParams) -> list[int]:
    """Those that the text shows: a token that ended the sequence only where that is asked for."""
    drops = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
    return sequence.tokens[: len(sequence.tokens) - drops]


def _plain_settings(section: Any) -> dict[str, Any]:
    """The fields of a section, without sections inside it."""
    fields = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in fields.items() if not dataclasses.is_dataclass(value)}


def _load_of(requests: Sequence[PreparedRequest]) -> Load:
    params = [item.request.params for item in requests]
    return Load(
        sum(item.n if isinstance(item, SamplingParams) else 1 for item in params),
        sum(len(item.request.prompt_token_ids) for item in requests),
    )
