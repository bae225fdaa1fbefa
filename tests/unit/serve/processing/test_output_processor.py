"""Engine outputs become outputs of requests: kinds, ends, merging, late tokens."""

import asyncio
import gc
from typing import Any

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finish,
    FinishReason,
)
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.processing.output_processor import OutputProcessor, in_chunks
from pagemill.serve.processing.parallel_sampling import fan_out
from pagemill.serve.processing.request_stream import CompletionState, OutputQueue, RequestStream
from tests.fakes.fake_core import logprobs_of
from tests.fakes.fake_tokenizer import EOS, ByteTokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Setup:
    """One request "r" of a user, known to the engine as "e"."""

    def __init__(self, tokenizer: Any = None, sink: Any = None, prompt: tuple[int, ...] = (1,), **params: Any) -> None:
        self.processor = OutputProcessor(lambda token: token == EOS)
        self.queue = OutputQueue(sink)
        request = EngineCoreRequest(
            request_id="e", prompt_token_ids=list(prompt), params=SamplingParams(seed=1, **params), arrival_time=0.0
        )
        self.stream = RequestStream("r", "p", fan_out(request), tokenizer or ByteTokenizer(), self.queue)
        self.processor.add(self.stream)

    def tokens(self, text: str, request_id: str = "e") -> list[str]:
        """One step per character, in the short form."""
        aborts = []
        for token in text.encode():
            aborts += self.processor.process(EngineCoreOutputs(request_ids=[request_id], token_ids=[token]))
            self.processor.tell()
        return aborts

    def output(self, ids: list[int], finish: Finish | None = None, request_id: str = "e", **more: Any) -> list[str]:
        output = EngineCoreOutput(request_id=request_id, new_token_ids=ids, finish=finish, **more)
        aborts = self.processor.process(EngineCoreOutputs(outputs=[output]))
        self.processor.tell()
        return aborts

    async def get(self) -> RequestOutput:
        return await asyncio.wait_for(self.queue.get(), 1)


async def test_deltas_merge_while_nobody_takes_them() -> None:
    setup = Setup(output_kind=DELTA)
    setup.output([104], num_cached_tokens=7)
    setup.tokens("el")
    first = await setup.get()
    assert (first.request_id, first.prompt, first.prompt_token_ids, first.num_cached_tokens) == ("r", "p", [1], 7)
    assert first.outputs == [CompletionOutput(0, "hel", [104, 101, 108])]
    setup.output(list(b"lo"), Finish(FinishReason.LENGTH))
    last = await setup.get()
    assert last.outputs == [CompletionOutput(0, "lo", [108, 111], "length")]
    assert last.finished


async def test_what_is_said_of_the_prompt_comes_when_the_first_completion_says_it() -> None:
    setup = Setup(n=2, prompt=(1, 97, 98), prompt_logprobs=0, output_kind=CUMULATIVE)
    setup.output([104], request_id="e.1")
    assert (await setup.get()).prompt_logprobs is None
    setup.output([104], request_id="e.0", prompt_logprobs=logprobs_of([97, 98], 0))
    found = (await setup.get()).prompt_logprobs
    assert found is not None
    assert [row and list(row) for row in found] == [None, [97], [98]]
    short = Setup(prompt_logprobs=0, output_kind=CUMULATIVE)
    short.output([104])
    assert list((await short.get()).prompt_logprobs or ()) == [None]


class Texts:
    """A sink that keeps what is pushed."""

    def __init__(self) -> None:
        self.opened = True
        self.texts: list[str] = []
        self.error: Exception | None = None

    def is_open(self) -> bool:
        return self.opened

    def push(self, output: RequestOutput) -> None:
        if self.error is not None:
            raise self.error
        self.texts += [item.text for item in output.outputs]


async def test_a_sink_gets_what_ends_nothing_while_the_consumer_waits() -> None:
    sink = Texts()
    setup = Setup(sink=sink, output_kind=DELTA)
    setup.tokens("a")
    assert not sink.texts  # nobody waits: the consumer may still be busy with what came before
    assert [item.text for item in (await setup.get()).outputs] == ["a"]
    waiting = asyncio.create_task(setup.get())
    await asyncio.sleep(0.001)
    setup.tokens("bc")
    assert sink.texts == ["b", "c"]
    sink.opened = False
    setup.tokens("de")
    sink.opened = True
    setup.tokens("f")  # behind "de", which the consumer was woken for and has not taken
    assert [item.text for item in (await waiting).outputs] == ["def"]
    waiting = asyncio.create_task(setup.get())
    await asyncio.sleep(0.001)
    setup.tokens("g")
    setup.output([104], Finish(FinishReason.LENGTH))
    last = await waiting
    assert last.outputs == [CompletionOutput(0, "h", [104], "length")]
    assert last.finished
    assert sink.texts == ["b", "c", "g"]


async def test_a_sink_gets_nothing_of_a_request_of_which_a_part_has_ended() -> None:
    sink = Texts()
    setup = Setup(sink=sink, output_kind=DELTA, n=2)
    waiting = asyncio.create_task(setup.get())
    await asyncio.sleep(0.001)
    setup.tokens("a", "e.0")
    setup.output([98], Finish(FinishReason.LENGTH), "e.1")
    assert [(item.index, item.text) for item in (await waiting).outputs] == [(1, "b")]
    assert sink.texts == ["a"]


async def test_what_a_sink_raises_is_raised_in_the_consumer() -> None:
    sink = Texts()
    setup = Setup(sink=sink, output_kind=DELTA)
    waiting = asyncio.create_task(setup.get())
    await asyncio.sleep(0.001)
    sink.error = ValueError("not this one")
    assert setup.tokens("a") == []
    with pytest.raises(ValueError, match="not this one"):
        await waiting


async def test_cumulative_outputs_hold_everything() -> None:
    setup = Setup()
    setup.tokens("he")
    first = await setup.get()
    setup.output([121], Finish(FinishReason.LENGTH))
    last = await setup.get()
    assert [item.outputs[0].text for item in (first, last)] == ["he", "hey"]
    assert first.outputs[0].token_ids == [104, 101]


async def test_final_only_waits_for_all_completions() -> None:
    setup = Setup(output_kind=FINAL_ONLY, n=2)
    setup.tokens("a", "e.0")
    setup.output([98], Finish(FinishReason.LENGTH), "e.1")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(setup.queue.get(), 0.01)
    setup.output([99], Finish(FinishReason.LENGTH), "e.0")
    assert [item.text for item in (await setup.get()).outputs] == ["ac", "b"]


@pytest.mark.parametrize("taken", [True, False])
async def test_completions_need_no_garbage_collection(taken: bool) -> None:
    setup = Setup(output_kind=FINAL_ONLY, n=2)
    gc.collect()  # what other tests left
    gc.disable()
    try:
        for request_id in ("e.0", "e.1"):
            setup.output([98], Finish(FinishReason.LENGTH), request_id)
        if taken:
            await setup.get()
        else:
            setup.processor.discard([setup.stream])
        assert CompletionState not in {type(item) for item in gc.get_objects()}
    finally:
        gc.enable()


async def test_a_delta_lists_only_completions_with_news() -> None:
    setup = Setup(output_kind=DELTA, n=2)
    setup.output([97], Finish(FinishReason.LENGTH), "e.1")
    first = await setup.get()
    assert [(item.index, item.finish_reason) for item in first.outputs] == [(1, "length")]
    assert not first.finished
    setup.output([98], Finish(FinishReason.LENGTH), "e.0")
    last = await setup.get()
    assert [item.index for item in last.outputs] == [0]
    assert last.finished


async def test_a_stop_string_ends_here_and_late_tokens_are_ignored() -> None:
    setup = Setup(output_kind=DELTA, stop=["lo"])
    assert setup.tokens("hello!") == ["e"]
    output = await setup.get()
    assert output.outputs == [CompletionOutput(0, "hel", list(b"hello"), "stop", "lo")]
    assert output.finished
    assert setup.processor.num_in_flight == 0
    assert setup.output([1], Finish(FinishReason.ABORT)) == []


async def test_no_abort_when_the_engine_ended_with_the_same_token() -> None:
    setup = Setup(stop=["o"])
    assert setup.output(list(b"hello"), Finish(FinishReason.LENGTH)) == []
    assert (await setup.get()).outputs[0].finish_reason == "stop"


async def test_tokens_after_a_stop_string_in_one_output_do_not_count() -> None:
    setup = Setup(stop=["l"])
    assert setup.output(list(b"hello")) == ["e"]
    assert (await setup.get()).outputs[0].token_ids == list(b"hel")


@pytest.mark.parametrize(("token", "include", "text", "stop_reason"), [
    (EOS, False, "hi", None), (33, False, "hi", 33), (33, True, "hi!", 33),
])  # fmt: skip
async def test_stop_tokens(token: int, include: bool, text: str, stop_reason: int | None) -> None:
    setup = Setup(stop_token_ids=[33], include_stop_str_in_output=include)
    setup.tokens("hi")
    setup.output([token], Finish(FinishReason.STOP, stop_token_id=token))
    completion = (await setup.get()).outputs[0]
    assert completion == CompletionOutput(0, text, [*b"hi", token], "stop", stop_reason)


async def test_a_stop_token_that_was_named_is_the_reason_where_the_end_of_sequence_is_ignored() -> None:
    setup = Setup(stop_token_ids=[EOS], ignore_eos=True)
    setup.output([EOS], Finish(FinishReason.STOP, stop_token_id=EOS))
    assert (await setup.get()).outputs[0].stop_reason == EOS


async def test_held_back_text_comes_with_the_end() -> None:
    setup = Setup(output_kind=DELTA, stop=["xyz"])
    setup.tokens("axy")
    assert (await setup.get()).outputs[0].text == "a"
    setup.output([121], Finish(FinishReason.LENGTH))
    assert (await setup.get()).outputs[0].text == "xyy"


async def test_abort_by_the_users_id() -> None:
    setup = Setup(n=2)
    setup.tokens("a", "e.0")
    assert setup.processor.abort("e") == []
    assert setup.processor.abort("r") == ["e.0", "e.1"]
    output = await setup.get()
    assert [(item.text, item.finish_reason) for item in output.outputs] == [("a", "abort"), ("", "abort")]
    assert output.finished


async def test_discard_returns_what_the_engine_still_runs() -> None:
    setup = Setup(n=2)
    setup.output([97], Finish(FinishReason.LENGTH), "e.0")
    assert setup.processor.discard([setup.stream]) == ["e.1"]
    assert setup.tokens("b", "e.1") == []
    assert setup.processor.discard([setup.stream]) == []


async def test_an_error_of_the_engine_ends_the_request_alone() -> None:
    setup = Setup()
    setup.output([], Finish(FinishReason.ERROR, message="no grammar"))
    assert (await setup.get()).outputs[0].finish_reason == "error"


async def test_an_exception_while_decoding_ends_the_request_alone() -> None:
    class Broken(ByteTokenizer):
        def incremental(self, prompt_token_ids: Any, skip_special_tokens: bool = True) -> Any:
            class Decoder:
                def step(self, token_ids: Any) -> str:
                    raise KeyError(token_ids)

            return Decoder()

    setup = Setup(Broken(), stop=["x"])
    assert setup.tokens("a") == ["e"]
    assert (await setup.get()).outputs[0].finish_reason == "error"


async def test_death_reaches_everybody() -> None:
    setup = Setup()
    waiting = asyncio.create_task(setup.get())
    await asyncio.sleep(0)
    setup.processor.fail_all(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await setup.get()


async def test_without_detokenizing_there_are_only_ids() -> None:
    setup = Setup(detokenize=False)
    setup.output(list(b"hi"), Finish(FinishReason.LENGTH))
    assert (await setup.get()).outputs[0] == CompletionOutput(0, "", [104, 105], "length")


def test_large_steps_come_in_chunks_with_everything_in_them_once():
    outputs = EngineCoreOutputs(
        engine_index=3,
        request_ids=[f"r{index}" for index in range(250)],
        token_ids=list(range(250)),
        outputs=[EngineCoreOutput(request_id=f"o{index}", new_token_ids=[index]) for index in range(130)],
        stats=SchedulerStats(num_running=380),
    )
    parts = list(in_chunks(outputs, 100))
    assert [(len(part.request_ids), len(part.outputs)) for part in parts] == [
        (100, 0),
        (100, 0),
        (50, 0),
        (0, 100),
        (0, 30),
    ]
    assert [token for part in parts for token in part.token_ids] == outputs.token_ids
    assert [name for part in parts for name in part.request_ids] == outputs.request_ids
    assert [output for part in parts for output in part.outputs] == outputs.outputs
    assert all(part.engine_index == 3 for part in parts)
    assert list(in_chunks(outputs, 380)) == [outputs]


def row(token: int) -> EngineCoreOutputs:
    """A step that had one token."""
    return EngineCoreOutputs(request_ids=["e"], token_ids=[token])


async def test_a_consumer_hears_once_of_several_steps() -> None:
    sink = Texts()
    setup = Setup(sink=sink, output_kind=DELTA)
    setup.output([97])
    await setup.get()
    waiting = asyncio.create_task(setup.queue.get())
    await asyncio.sleep(0)
    for token in b"bcd":
        assert setup.processor.process(row(token)) == []
    assert not sink.texts
    assert not setup.processor.tell()
    assert sink.texts == ["bcd"]
    waiting.cancel()


async def test_consumers_are_told_so_many_at_a_time() -> None:
    setup = Setup(output_kind=DELTA)
    setup.processor.process(row(97))
    assert setup.processor.tell(0)
    assert not setup.processor.tell(1)
    assert (await setup.get()).outputs[0].text == "a"


async def test_what_a_consumer_has_taken_already_is_not_told_again() -> None:
    """It may look between a step and the telling, for what a step before has left."""
    setup = Setup(output_kind=DELTA)
    setup.processor.process(row(97))
    setup.processor.tell()
    setup.processor.process(row(98))
    assert (await setup.get()).outputs[0].text == "ab"
    setup.processor.tell()
    waiting = asyncio.create_task(setup.queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    setup.tokens("c")
    setup.processor.process(
        EngineCoreOutputs(
            outputs=[EngineCoreOutput(request_id="e", new_token_ids=[100], finish=Finish(FinishReason.LENGTH))]
        )
    )
    last = await waiting
    assert (last.outputs[0].text, last.finished) == ("cd", True)
    setup.processor.tell()  # the stream is released: nobody takes what is left of it
    again = asyncio.create_task(setup.queue.get())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_drafts_are_counted_with_the_tokens_of_their_steps(kind: RequestOutputKind) -> None:
    setup = Setup(output_kind=kind, stop=["xy"], max_tokens=50)
    setup.output(list(b"abc"), num_drafts=4, num_accepted=2)
    setup.output(list(b"d"), num_drafts=2)
    (first,) = (await setup.get()).outputs
    assert (first.num_draft_tokens, first.num_accepted_tokens) == (6, 2)
    setup.tokens("e")
    (second,) = (await setup.get()).outputs
    assert (second.num_draft_tokens, second.num_accepted_tokens) == ((0, 0) if kind is DELTA else (6, 2))
    setup.output(list(b"wxyz!"), num_drafts=4, num_accepted=4)
    (last,) = (await setup.get()).outputs
    assert last.finish_reason == "stop"
    told = (last.num_draft_tokens, last.num_accepted_tokens)
    assert told == ((4, 3) if kind is DELTA else (10, 5)), "drafts behind the stop string are no part of the text"
