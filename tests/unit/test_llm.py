"""The LLM class on a fake engine, as scripts and notebooks use it."""

import asyncio
import importlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.config.pooler_config import PoolerConfig
from pagemill.errors import ConfigError, EngineDeadError, RequestError
from pagemill.messages.sampling_params import SamplingParams
from tests.fakes.engine import FACTS, make_engine
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import BOS, EOS

MakeLLM = Callable[..., Any]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    """LLM objects whose engine has the given core."""
    made: list[Any] = []
    launch = types.ModuleType("pagemill.launch")
    monkeypatch.setitem(sys.modules, "pagemill.launch", launch)
    monkeypatch.delitem(sys.modules, "pagemill.llm", raising=False)

    def make(
        core: FakeCore | None = None, *, log_stats: bool = True, pooler: PoolerConfig | None = None, **settings: Any
    ) -> Any:
        def build_inproc(args: Any) -> Any:
            policy = args.settings.scheduler.scheduling_policy
            engine = make_engine(core, log_stats=log_stats, pooler=pooler, scheduling_policy=policy)
            return types.SimpleNamespace(llm=engine, config=args, tokenizer=engine.tokenizer, facts=FACTS)

        launch.build_inproc = build_inproc  # type: ignore[attr-defined]
        module = importlib.import_module("pagemill.llm")
        monkeypatch.setattr(module, "build_inproc", build_inproc)
        made.append(module.LLM("fake", **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
    monkeypatch.delitem(sys.modules, "pagemill.llm", raising=False)


GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_after_shutdown_it_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("hello", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.reset_prefix_cache()


def test_threads_take_turns(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with ThreadPoolExecutor(4) as pool:
        outputs = pool.map(lambda text: llm.generate([text] * 3, GREEDY, use_tqdm=False), ["hello", "world"] * 4)
        assert [texts(output) for output in outputs] == [["hell"] * 3, ["worl"] * 3] * 4


@pytest.mark.parametrize("prompts", [
    np.array([*b"hi"]), [np.int64(104), np.int32(105)], {"prompt_token_ids": np.array([*b"hi"])}, [np.array([*b"hi"])],
])  # fmt: skip
def test_arrays_are_token_ids(make_llm: MakeLLM, prompts: Any) -> None:
    (output,) = make_llm().generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [*b"hi"]


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_prompt_is_refused(make_llm: MakeLLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts="):
        make_llm().generate(prompts, GREEDY, use_tqdm=False)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(("prompts", "expected"), [
    ("hello", ["hell"]),
    (["hello", "world"], ["hell", "worl"]),
    ([BOS, *b"hello"], ["hell"]),
    ([[*b"hello"], "world"], ["hell", "worl"]),
    ({"prompt": "hello"}, ["hell"]),
    ([{"prompt_token_ids": [*b"hello"]}, {"prompt": "world"}], ["hell", "worl"]),
    ([], []),
])  # fmt: skip
def test_forms_of_prompts(make_llm: MakeLLM, prompts: Any, expected: list[str]) -> None:
    assert texts(make_llm().generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_fields_users_know(make_llm: MakeLLM) -> None:
    output = make_llm(FakeCore(say("hi", EOS))).generate("ab", GREEDY)[0]
    assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("ab", [BOS, 97, 98], 2)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("hi", [104, 105, EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_params_per_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = [SamplingParams(max_tokens=length) for length in (3, 1, 2)]
    assert texts(llm.generate(["abcd", "efgh", "ijkl"], params, use_tqdm=False)) == ["abc", "e", "ij"]
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate("a", params[:2])


def test_calls_follow_each_other_and_ids_do_not_repeat(make_llm: MakeLLM) -> None:
    llm = make_llm()
    outputs = [*llm.generate(["a", "b"], GREEDY), *llm.generate("c", GREEDY)]
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert llm.reset_prefix_cache() is True


def test_default_params_are_the_models(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate("ab", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_max_tokens_beyond_the_room_means_the_room(make_llm: MakeLLM) -> None:
    completion = make_llm().generate("ab", SamplingParams(max_tokens=10_000), use_tqdm=False)[0].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (253, "length")


def test_a_bad_prompt_raises_before_anything_runs(make_llm: MakeLLM) -> None:
    core = FakeCore()
    llm = make_llm(core)
    for bad in ("", [-1], [10**6], "x" * 300, {"nonsense": 1}, 5):
        with pytest.raises(RequestError):
            llm.generate(["good", bad], GREEDY, use_tqdm=False)
    assert core.seen == []
    assert texts(llm.generate("good", GREEDY)) == ["good"]


def test_chat(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeCore(say("hey", EOS)))
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert (texts(one), one[0].prompt) == (["hey"], "[user]hi[assistant]")
    assert BOS not in one[0].prompt_token_ids
    two = llm.chat([conversation, conversation], [GREEDY, GREEDY], use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in two] == ["[user]hi"] * 2
    assert llm.chat([], GREEDY, use_tqdm=False) == []
    for bad in ([{"role": "user"}], [[]]):
        with pytest.raises(RequestError):
            llm.chat(bad, GREEDY)


def test_there_are_no_statistics_unless_asked_for(make_llm: MakeLLM) -> None:
    assert make_llm().config.settings.observability.disable_log_stats
    llm = make_llm(log_stats=False)
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_metrics_are_objects(make_llm: MakeLLM) -> None:
    llm = make_llm(disable_log_stats=False)
    llm.generate(["hello", "world"], GREEDY, use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics() if "finished_reason" not in metric.labels}
    assert found["vllm:generation_tokens"].value == 8
    assert found["vllm:e2e_request_latency_seconds"].count == 2
    assert found["vllm:num_requests_running"].labels == {"model_name": "fake", "engine": "0"}
    assert not llm.config.settings.observability.disable_log_stats


def test_unknown_setting(make_llm: MakeLLM) -> None:
    with pytest.raises(TypeError, match="max_modell_len"):
        make_llm(max_modell_len=5)


async def test_inside_a_running_loop(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert texts(llm.generate("hello", GREEDY, use_tqdm=False)) == ["hell"]
    llm.shutdown()


def test_context_manager_and_shutdown(make_llm: MakeLLM) -> None:
    core = FakeCore()
    with make_llm(core) as llm:
        llm.generate("a", GREEDY)
    assert core.is_shut_down
    llm.shutdown()


def test_progress_is_shown(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    make_llm().generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_interrupt_aborts_what_runs(make_llm: MakeLLM) -> None:
    core = FakeCore(step_s=0.005)
    llm = make_llm(core)
    timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SamplingParams(max_tokens=250), use_tqdm=False)
    timer.join()
    assert len(core.aborted) == 2
    assert core.num_running == 0
    assert texts(llm.generate("good", GREEDY)) == ["good"]


def test_an_engine_that_dies_raises(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeCore(fail_after=2))
    with pytest.raises(Exception, match="died"):
        llm.generate("abc", GREEDY)


def test_its_loop_is_not_the_programs(make_llm: MakeLLM) -> None:
    make_llm().generate("abc", GREEDY)
    assert asyncio.run(asyncio.sleep(0, "fine")) == "fine"


def test_enqueue_and_wait(make_llm: MakeLLM) -> None:
    core = FakeCore()
    llm = make_llm(core)
    ids = llm.enqueue(["hello", "world"], GREEDY, use_tqdm=False)
    ids += llm.enqueue([*b"again"], SamplingParams(max_tokens=2))
    assert core.seen == []
    assert texts(llm.generate("other", GREEDY, use_tqdm=False)) == ["othe"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids == ["0", "1", "2"]
    assert texts(outputs) == ["hell", "worl", "ag"]
    assert llm.wait_for_completion() == []
    with pytest.raises(ValueError, match=r"output_type=.* is not allowed"):
        llm.wait_for_completion(int)


def test_a_bad_prompt_is_not_enqueued(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.enqueue(["good", ""], GREEDY)
    assert llm.wait_for_completion() == []


def test_enqueued_chats(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeCore(say("hey", EOS)))
    conversation = [{"role": "user", "content": "hi"}]
    assert llm.enqueue_chat([conversation] * 2, GREEDY, add_generation_prompt=False, use_tqdm=False) == ["0", "1"]
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == ["[user]hi"] * 2


def test_priorities_are_those_of_the_prompts(make_llm: MakeLLM) -> None:
    core = FakeCore()
    llm = make_llm(core, scheduling_policy="priority")
    llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[2, -1])
    assert [request.priority for request in core.seen] == [2, -1]
    with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_reach_the_template(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(FakeCore(say("hey", EOS)))
    seen: list[Any] = []
    render = llm.get_tokenizer().render_chat

    def spy(messages: Any, **variables: Any) -> Any:
        seen.append(variables.pop("tools", None))
        return render(messages, **variables)

    monkeypatch.setattr(llm.get_tokenizer(), "render_chat", spy)
    conversation = [{"role": "user", "content": "hi"}]
    llm.chat(conversation, GREEDY, use_tqdm=False, tools=[TOOL])
    llm.chat(conversation, GREEDY, use_tqdm=False, tools=None)
    assert (seen[0][0]["function"]["name"], seen[1]) == ("look", None)
    with pytest.raises(RequestError, match=r"tools\.0="):
        llm.chat(conversation, GREEDY, tools=[{"type": "retrieval"}])


def test_from_engine_args(make_llm: MakeLLM) -> None:
    first = make_llm()
    llm = type(first).from_engine_args(EngineArgs("fake", max_num_seqs=3))
    assert llm.config.settings.scheduler.max_num_seqs == 3
    assert not llm.config.settings.observability.disable_log_stats
    assert texts(llm.generate("hello", GREEDY, use_tqdm=False)) == ["hell"]
    llm.shutdown()


class Angles(FakeCore):
    """The vector of a prompt points where its first token says."""

    def step(self) -> Any:
        outputs = super().step()
        for batch in outputs:
            for output in batch.outputs:
                first = next(r for r in self.seen if r.request_id == output.request_id).prompt_token_ids[0]
                assert output.pooled is not None
                output.pooled[:] = 0
                output.pooled[:2] = np.cos(first / 100), np.sin(first / 100)
        return outputs


def test_scores_are_cosines(make_llm: MakeLLM) -> None:
    core = Angles()
    llm = make_llm(core, pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    prompts = [[5, 1], [25, 2], [90, 3]]
    pairs = llm.score(prompts, [[7], [8], [9]], use_tqdm=False)
    expected = [np.cos((5 - 7) / 100), np.cos((25 - 8) / 100), np.cos((90 - 9) / 100)]
    assert [pair.outputs.score for pair in pairs] == pytest.approx(expected)
    assert pairs[1].prompt_token_ids == [25, 2, 8]
    before = len(core.seen)
    one_for_all = llm.score([5], prompts, use_tqdm=False)
    assert [pair.outputs.score for pair in one_for_all] == pytest.approx([np.cos((5 - x) / 100) for x in (5, 25, 90)])
    assert len(core.seen) == before + 4, "each prompt is computed once"
    assert all(request.params.normalize for request in core.seen)
    for first, second in ((prompts, [[7], [8]]), ("a", []), ([], "a")):
        with pytest.raises(RequestError, match=r"data_1 has \d prompts and data_2 \d"):
            llm.score(first, second)
    with pytest.raises(RequestError, match=r"task='classify' is not what this model does, which is embed"):
        llm.classify("a", use_tqdm=False)


def test_prompts_are_cut_where_that_is_asked_for(make_llm: MakeLLM) -> None:
    core = FakeCore()
    llm = make_llm(core, pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    prompts: list[Any] = ["abcd", [1, 2, 3, 4], {"prompt": "abcd"}, {"prompt_token_ids": [1, 2, 3, 4]}]
    for side, text, ids in ((None, [BOS, 97, 98], [1, 2, 3]), ("left", [BOS, 99, 100], [2, 3, 4])):
        how = {"truncate_prompt_tokens": 3, "truncation_side": side}
        found = llm.embed(prompts, use_tqdm=False, tokenization_kwargs=how)
        assert [output.prompt_token_ids for output in found] == [text, ids] * 2
    (score,) = llm.score("abcd", "abc" * 200, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(score.prompt_token_ids) == 5 + 256
    for how, field in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "top"}, "truncation_side"),
        ({"padding": True}, "tokenization_kwargs"),
    ):
        with pytest.raises(RequestError) as refused:
            llm.embed("a", use_tqdm=False, tokenization_kwargs=how)
        assert refused.value.field == field
