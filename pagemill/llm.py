"""`LLM`: offline inference in this process, for scripts and notebooks.
A synchronous face of `AsyncLLM`; it adds batches and a progress bar and knows nothing about how text is made."""

import asyncio
import contextlib
import gc
import itertools
import threading
import traceback
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
from tqdm import tqdm

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError, EngineDeadError, RequestError
from pagemill.launch import build_inproc
from pagemill.messages.outputs import PoolingRequestOutput, RequestOutput
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt, Prompts
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.observability.readings import Metric, readings
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.chat_renderer import ChatOptions
from pagemill.serve.processing.input_processor import RequestOptions
from pagemill.tokenizers.interface import Tokenizer

T = TypeVar("T")

Conversation = Sequence[Mapping[str, Any]]


class PrivateLoop:
    """An event loop of our own, run while a call lasts. Ctrl-C cancels the call, whose clean-up then runs."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._task: asyncio.Task[Any] | None = None
        self._turn = threading.Lock()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to completion, also when the calling thread runs another loop (a notebook): then in a helper thread.
        Threads take turns. Raises EngineDeadError after `close`."""
        with self._turn:
            if self._closed:
                work.close()
                raise EngineDeadError("the LLM was shut down; make another one")
            if _in_running_loop():
                return self._run_aside(self._tracked(work))
            return self._runner.run(work)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then close the loop."""
        try:
            self.run(last)
        finally:
            self._closed = True
            if _in_running_loop():
                with ThreadPoolExecutor(1) as helper:
                    helper.submit(self._runner.close).result()
            else:
                self._runner.close()

    def _run_aside(self, work: Coroutine[Any, Any, T]) -> T:
        with ThreadPoolExecutor(1, "pagemill-llm") as helper:
            future = helper.submit(self._runner.run, work)
            try:
                return future.result()
            except KeyboardInterrupt:
                if self._task is not None:
                    self._runner.get_loop().call_soon_threadsafe(self._task.cancel)
                raise

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        return await work


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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


class LLM:
    """A model ready to generate.

    Keyword arguments are the settings of the engine (`EngineArgs`): dtype, max_model_len, max_num_seqs, ...
    Raises TypeError for an unknown one, ConfigError or ModelError when the model cannot be loaded.
    """

    def __init__(self, model: str = "smollm2", **engine_args: Any) -> None:
        # There is a progress bar: statistics only for those who ask for them.
        args = EngineArgs(model, **({"disable_log_stats": True} | engine_args))
        try:
            launched = build_inproc(args, inline=True)
        except Exception as error:
            _let_go(error)
            raise
        self.config = launched.config
        self._engine: AsyncLLM = launched.llm
        self._loop = PrivateLoop()
        self._request_ids = itertools.count()
        self._close = weakref.finalize(self, _shut_down, self._loop, self._engine)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, token ids, a dict naming either, or a list of those; results in their order.

        `sampling_params` is one for all, or one per prompt; None means `get_default_sampling_params()`. A max_tokens
        beyond the room in the context means the room. Raises RequestError (a ValueError) before anything runs when
        one prompt is at fault.
        """
        batch = _as_batch(prompts)
        return self._complete(batch, self._params_for(len(batch), sampling_params), False, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue one conversation, or a list of them: the model's chat template makes the prompts.

        The outputs are those of `generate`; `prompt` is the rendered text.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Conversation], [messages] if single else messages)
        options = ChatOptions(add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs)
        rendered: list[Prompt] = [self._engine.render_chat(conversation, options) for conversation in conversations]
        return self._complete(rendered, self._params_for(len(rendered), sampling_params), True, use_tqdm)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Make vectors of prompts, in their order; `outputs.data` of each is a float32 array. Prompts are given as for
        `generate`. Raises RequestError, also when the model was loaded to generate (runner="generate")."""
        batch = _as_batch(prompts)
        params = pooling_params if isinstance(pooling_params, Sequence) else [pooling_params or PoolingParams()]
        if len(params) not in (1, len(batch)):
            raise ValueError(f"pooling_params has {len(params)} entries for {len(batch)} prompts")
        given = [*params] * (len(batch) if len(params) == 1 else 1)
        jobs = list(zip((str(next(self._request_ids)) for _ in batch), batch, given, strict=True))
        return self._loop.run(_pool_batch(self._engine, jobs, use_tqdm))

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[PoolingRequestOutput]:
        """`encode`; `outputs.embedding` of each is a list of numbers."""
        return self.encode(prompts, pooling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Every `vllm:*` metric, as Counter, Gauge or Histogram, one per set of labels. See docs/metrics.md.

        Raises ConfigError unless the LLM was made with disable_log_stats=False."""
        if not self._engine.metrics.enabled:
            raise ConfigError("get_metrics() needs statistics, which LLM keeps with disable_log_stats=False only")
        return readings(self._engine.metrics.collect())

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with the values that the model recommends."""
        return self._engine.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when blocks are in use and nothing was done."""
        return self._loop.run(self._engine.reset_prefix_cache())

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
        given = params if isinstance(params, Sequence) else [params or self.get_default_sampling_params()] * num_prompts
        if len(given) != num_prompts:
            raise ValueError(f"sampling_params has {len(given)} entries for {num_prompts} prompts")
        return [item.replace(output_kind=RequestOutputKind.FINAL_ONLY) for item in given]

    def _complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], rendered: bool, use_tqdm: bool
    ) -> list[RequestOutput]:
        options = RequestOptions(add_special_tokens=not rendered, rendered=rendered, clamp_max_tokens=True)
        batch = list(zip((str(next(self._request_ids)) for _ in prompts), prompts, params, strict=True))
        return self._loop.run(_run_batch(self._engine, batch, options, use_tqdm))


async def _run_batch(
    engine: AsyncLLM, batch: Sequence[tuple[str, Prompt, SamplingParams]], options: RequestOptions, use_tqdm: bool
) -> list[RequestOutput]:
    """Prepare all of (id, prompt, params), then run all; the final outputs in the order of the batch."""
    requests = [await engine.prepare(prompt, params, options) for _, prompt, params in batch]
    request_ids = [request_id for request_id, _, _ in batch]
    finished: dict[str, RequestOutput] = {}
    num_tokens = 0
    with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm, unit="prompt") as bar:
        async with contextlib.aclosing(engine.stream(requests, request_ids)) as outputs:
            async for output in outputs:
                finished[output.request_id] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{num_tokens / elapsed_s:.1f} tokens/s", refresh=False)
                bar.update()
    return [finished[request_id] for request_id in request_ids]


async def _pool_batch(
    engine: AsyncLLM, batch: Sequence[tuple[str, Prompt, PoolingParams]], use_tqdm: bool
) -> list[PoolingRequestOutput]:
    """`_run_batch`, for vectors."""
    requests = [await engine.prepare(prompt, params) for _, prompt, params in batch]
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
