"""`LLM`: offline inference in this process, for scripts and notebooks.
A synchronous face of `AsyncLLM`; it adds batches and a progress bar and knows nothing about how text is made."""

import asyncio
import contextlib
import gc
import itertools
import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy as np
from tqdm import tqdm

from pagemill.catalog.logits import path_of
from pagemill.config.arguments import EngineArgs
from pagemill.errors import RequestError
from pagemill.launch import build_inproc
from pagemill.messages.beam_search import BeamSearchOutput, BeamSearchParams
from pagemill.messages.outputs import PoolingRequestOutput, RequestOutput, ScoringOutput, ScoringRequestOutput
from pagemill.messages.pooling_params import PoolingParams, PoolingTask
from pagemill.messages.prompts import Prompt, Prompts
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.offline import OfflineControl, PrivateLoop
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.chat_renderer import ChatOptions
from pagemill.serve.other_arguments import refuse_others
from pagemill.serve.processing.cutting import Cut
from pagemill.serve.processing.input_processor import PreparedRequest, RequestOptions
from pagemill.serve.processing.pooling_params import likeness
from pagemill.serve.processing.tool_definitions import parse_tools
from pagemill.tokenizers.pair_cut import PairCut

Conversation = Sequence[Mapping[str, Any]]


class _Pair(NamedTuple):
    """Two texts that a model scores together."""

    first: Any
    second: Any
    cut: PairCut


def _let_go(error: BaseException) -> None:
    """Empty the frames that an error went through, and collect: they hold weights, and a notebook keeps its last
    error, so that the next attempt would find the memory taken."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
    gc.collect()


def _shut_down(loop: PrivateLoop, engine: AsyncLLM) -> None:
    loop.close(engine.shutdown())


class LLM(OfflineControl):
    """A model ready to generate.

    Keyword arguments are the settings of the engine (`EngineArgs`): dtype, max_model_len, max_num_seqs, ...
    `logits_processors` may hold classes too. Raises TypeError for an unknown keyword, ConfigError or ModelError when
    the model cannot be loaded.
    """

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        # There is a progress bar: statistics only for those who ask for them.
        processors = engine_args.get("logits_processors")
        if isinstance(processors, (list, tuple)):
            engine_args["logits_processors"] = [path_of(item) for item in processors]
        self._start(EngineArgs(model, **({"disable_log_stats": True} | engine_args)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same from settings that are checked already; statistics are kept unless they say otherwise."""
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        try:
            launched = build_inproc(args)
        except Exception as error:
            _let_go(error)
            raise
        self.config = launched.config
        self._engine = launched.llm
        self._loop = PrivateLoop()
        self._request_ids = itertools.count()
        self._queued: dict[str, PreparedRequest] = {}
        self._close = weakref.finalize(self, _shut_down, self._loop, self._engine)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, token ids, a dict naming either, or a list of those; results in their order.

        `sampling_params` is one for all, or one per prompt; None means `get_default_sampling_params()`. A max_tokens
        beyond the room in the context means the room. `priority` is one number per prompt, for
        scheduling_policy="priority": the lowest first. `others`: arguments of vLLM that have no counterpart, with
        values that ask for nothing (serve/other_arguments.py). Raises RequestError (a ValueError) before anything runs
        when one prompt is at fault.
        """
        refuse_others("LLM.generate", others)
        return self._finish(self._prepare(_as_batch(prompts), sampling_params, priority), use_tqdm)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[str]:
        """`generate` in two halves: check prompts and keep them, to run with the next `wait_for_completion`. Their ids,
        in their order."""
        refuse_others("LLM.enqueue", {name: value for name, value in others.items() if name != "use_tqdm"})
        return self._keep(self._prepare(_as_batch(prompts), sampling_params, priority))

    def enqueue_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        **options: Any,
    ) -> list[str]:
        """`enqueue` of conversations; `options` are those of `chat`."""
        rendered = self._render(messages, **{name: value for name, value in options.items() if name != "use_tqdm"})
        return self._keep(self._prepare(rendered, sampling_params, priority, rendered=True))

    def wait_for_completion(
        self, output_type: type[RequestOutput] = RequestOutput, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Run all that was enqueued; the outputs in the order of `enqueue`. Nothing is left when this ends, also
        with an error. Raises ValueError for another `output_type`."""
        if output_type is not RequestOutput:
            raise ValueError(f"output_type={output_type!r} is not allowed: RequestOutput; vectors come from encode()")
        queued = self._queued
        self._queued = {}
        return self._finish(queued, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation, or a list of them: the model's chat template makes the prompts.

        `tools`: definitions of functions, as of the HTTP API, that the template shows to the model; calls are in the
        text, in the model's format. The outputs are those of `generate`; `prompt` is the rendered text.
        """
        rendered = self._render(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            **others,
        )
        return self._finish(self._prepare(rendered, sampling_params, None, rendered=True), use_tqdm)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, use_tqdm: bool = False, **others: Any
    ) -> list[BeamSearchOutput]:
        """The `beam_width` sequences of highest score for each prompt, best first; prompts are given as for `generate`.
        Scores are those of transformers. Raises RequestError."""
        refuse_others("LLM.beam_search", others)
        return self._loop.run(_search_batch(self._engine, _as_batch(prompts), params, use_tqdm))

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Make of prompts what the model makes of them, in their order; `outputs.data` of each is a float32 array.
        Prompts are given as for `generate`. `pooling_task`: the `task` of all of them, where they do not say.
        `tokenization_kwargs`: `truncate_prompt_tokens`, most tokens of each, -1: those of the context, and
        `truncation_side`, left or right, for prompts that are too long. Raises RequestError, also when the model was
        loaded to generate (runner="generate")."""
        refuse_others("LLM.encode", others)
        batch = _as_batch(prompts)
        params = pooling_params if isinstance(pooling_params, Sequence) else [pooling_params or PoolingParams()]
        if len(params) not in (1, len(batch)):
            raise ValueError(f"pooling_params has {len(params)} entries for {len(batch)} prompts")
        given = [item.replace(task=item.task or pooling_task) for item in params]
        given *= len(batch) if len(params) == 1 else 1
        cut = Cut.of_arguments(tokenization_kwargs)
        if cut is not None:
            batch = [self._engine.preparation.inputs.cut(prompt, cut) for prompt in batch]
        jobs = list(zip((str(next(self._request_ids)) for _ in batch), batch, given, strict=True))
        return self._loop.run(_pool_batch(self._engine, jobs, use_tqdm))

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """`encode`; `outputs.embedding` of each is a list of numbers. Raises RequestError for a model that makes no
        vectors of prompts."""
        return self.encode(prompts, pooling_params, use_tqdm, PoolingTask.EMBED, **others)

    def classify(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Tell classes of prompts apart; `outputs.probs` of each is a list of numbers, one for each class. Raises
        RequestError for a model that does not."""
        return self.encode(prompts, pooling_params, use_tqdm, PoolingTask.CLASSIFY, **others)

    def reward(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """What a model that judges says of each token: `outputs.data` of each prompt is [tokens, numbers]. Raises
        RequestError for a model that was not loaded for it (convert="reward")."""
        return self.encode(prompts, pooling_params, use_tqdm, PoolingTask.REWARD, **others)

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How like each other prompts are: as many of the first as of the second are compared in pairs, or one of the
        first with all of the second. A model that scores pairs reads two texts together; otherwise vectors are
        compared, prompts are given as for `generate`, and each is computed once. `tokenization_kwargs`: as of `encode`,
        for what is read together. Raises RequestError, also when the model was loaded to generate (runner="generate").
        """
        refuse_others("LLM.score", others)
        first, second = _as_batch(data_1), _as_batch(data_2)
        if len(first) not in (1, len(second)) or not second:
            raise RequestError(
                f"data_1 has {len(first)} prompts and data_2 {len(second)}: as many, not none, or one data_1 for all",
                "data_1",
            )
        pooling = self._engine.preparation.inputs.pooling
        pooling.check_compares()
        given = pooling_params or PoolingParams()
        if pooling.pairs:
            cut = self._engine.preparation.inputs.pair_cut(Cut.of_arguments(tokenization_kwargs))
            pairs = [_Pair(first[index % len(first)], second[index], cut) for index in range(len(second))]
            jobs = [(str(next(self._request_ids)), pair, given) for pair in pairs]
            return [_scored(output) for output in self._loop.run(_pool_batch(self._engine, jobs, use_tqdm))]
        params = given.replace(normalize=True)
        found = self.encode([*first, *second], params, use_tqdm, tokenization_kwargs=tokenization_kwargs)
        return [_compared(found[index % len(first)], other) for index, other in enumerate(found[len(first) :])]

    def shutdown(self) -> None:
        """Give the model's memory back. Called by itself at the end of a `with` block and of the program."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """One SamplingParams per prompt, that reports only the end."""
        if isinstance(params, Sequence):
            if len(params) != num_prompts:
                raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts")
            return [item.replace(output_kind=RequestOutputKind.FINAL_ONLY) for item in params]
        given = params or self.get_default_sampling_params()
        return [given.replace(output_kind=RequestOutputKind.FINAL_ONLY)] * num_prompts

    def _render(
        self,
        messages: Conversation | Sequence[Conversation],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> list[Prompt]:
        """The text of each conversation. Raises RequestError."""
        refuse_others("LLM.chat", others)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Conversation], [messages] if single else messages)
        variables = dict(chat_template_kwargs or {}) | ({"tools": parse_tools(list(tools))} if tools else {})
        options = ChatOptions(add_generation_prompt, continue_final_message, chat_template, variables)
        return [self._engine.render_chat(conversation, options) for conversation in conversations]

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        rendered: bool = False,
    ) -> dict[str, PreparedRequest]:
        """Id -> request, each checked, in the order of the prompts."""
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"priority has {len(priority)} entries for {len(prompts)} prompts")
        options = [
            RequestOptions(priority=place, add_special_tokens=not rendered, rendered=rendered, clamp_max_tokens=True)
            for place in priority or [0] * len(prompts)
        ]
        batch = list(zip(prompts, self._params_for(len(prompts), params), options, strict=True))
        requests = self._loop.run(_prepare_batch(self._engine, batch))
        return {str(next(self._request_ids)): request for request in requests}

    def _keep(self, requests: dict[str, PreparedRequest]) -> list[str]:
        self._queued |= requests
        return list(requests)

    def _finish(self, requests: dict[str, PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        return self._loop.run(_run_batch(self._engine, requests, use_tqdm))


def _scored(output: PoolingRequestOutput) -> ScoringRequestOutput:
    """Of a pair that was read together."""
    score = ScoringOutput(float(output.outputs.data[0]))
    return ScoringRequestOutput(
        output.request_id, score, output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )


def _compared(first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
    """Of vectors whose length is 1, of prompts or of their tokens."""
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(likeness(first.outputs.data, second.outputs.data)),
        [*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
    )


async def _prepare_batch(
    engine: AsyncLLM, batch: Sequence[tuple[Prompt, SamplingParams, RequestOptions]]
) -> list[PreparedRequest]:
    return [await engine.prepare(prompt, params, options) for prompt, params, options in batch]


async def _run_batch(engine: AsyncLLM, requests: dict[str, PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
    """Run all of id -> request; the final outputs in their order."""
    finished: dict[str, RequestOutput] = {}
    num_tokens = 0
    with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm, unit="prompt") as bar:
        async with contextlib.aclosing(engine.stream(list(requests.values()), list(requests))) as outputs:
            async for output in outputs:
                finished[output.request_id] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{num_tokens / elapsed_s:.1f} tokens/s", refresh=False)
                bar.update()
    return [finished[request_id] for request_id in requests]


async def _search_batch(
    engine: AsyncLLM, prompts: Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool
) -> list[BeamSearchOutput]:
    """All searches side by side; one that fails ends the others."""
    with tqdm(total=len(prompts), desc="Searching", disable=not use_tqdm, unit="prompt") as bar:
        tasks = [asyncio.create_task(engine.beam_search(prompt, params)) for prompt in prompts]
        for task in tasks:
            task.add_done_callback(lambda _: bar.update())
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pool_batch(
    engine: AsyncLLM, batch: Sequence[tuple[str, Prompt | _Pair, PoolingParams]], use_tqdm: bool
) -> list[PoolingRequestOutput]:
    """`_run_batch`, for prompts that are not continued."""
    pair = engine.preparation.inputs.prepare_pair
    requests = [
        pair(prompt.first, prompt.second, params, cut=prompt.cut)
        if isinstance(prompt, _Pair)
        else await engine.prepare(prompt, params)
        for _, prompt, params in batch
    ]
    request_ids = [request_id for request_id, _, _ in batch]
    finished: dict[str, PoolingRequestOutput] = {}
    with tqdm(total=len(requests), desc="Embedding", disable=not use_tqdm, unit="prompt") as bar:
        async with contextlib.aclosing(engine.pool(requests, request_ids)) as outputs:
            async for output in outputs:
                finished[output.request_id] = output
                bar.update()
    return [finished[request_id] for request_id in request_ids]


def _as_batch(prompts: Prompts) -> list[Prompt]:
    """A single prompt as a batch of one; a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts={prompts!r} is not allowed: a text, token ids, a dict, or a list of those", "prompts"
        )
    batch = [item.item() if isinstance(item, np.integer) else item for item in prompts]
    if batch and all(isinstance(item, int) for item in batch):
        return [cast(Prompt, batch)]
    return cast(list[Prompt], batch)
