"""`LLMEngine` on a fake engine: a request is added, and steps are asked for."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagemill import llm_engine
from pagemill.config.arguments import EngineArgs
from pagemill.config.pooler_config import PoolerConfig
from pagemill.errors import EngineDeadError, RequestError
from pagemill.llm_engine import LLMEngine
from pagemill.messages.outputs import PoolingRequestOutput, RequestOutput
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes.engine import make_engine
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

MakeEngine = Callable[..., LLMEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Engines around the given core."""
    made: list[LLMEngine] = []

    def engine(core: FakeCore | None = None, **settings: Any) -> LLMEngine:
        def build_inproc(args: Any, make_client: Any) -> Any:
            found = make_engine(core, make_client=make_client, **settings)
            return types.SimpleNamespace(llm=found, config=args, tokenizer=found.tokenizer)

        monkeypatch.setattr(llm_engine, "build_inproc", build_inproc)
        made.append(LLMEngine.from_engine_args(EngineArgs("fake"), usage_context=None, stat_loggers=None))
        return made[-1]

    yield engine
    for one in made:
        one.shutdown()


def texts(outputs: list[Any]) -> dict[str, str]:
    return {output.request_id: output.outputs[0].text for output in outputs}


def test_a_step_is_one_token_of_each(make: MakeEngine) -> None:
    engine = make(FakeCore(say("abcd", EOS)))
    assert not engine.has_unfinished_requests()
    assert engine.add_request("0", "hi", GREEDY) == "0"
    assert texts(engine.step()) == {"0": "a"}
    engine.add_request("1", "hi", GREEDY.replace(output_kind=RequestOutputKind.DELTA))
    assert engine.get_num_unfinished_requests() == 2
    assert texts(engine.step()) == {"0": "ab", "1": "a"}
    assert texts(engine.step()) == {"0": "abc", "1": "b"}
    last = engine.step()
    assert texts(last) == {"0": "abcd", "1": "c"}
    assert [output.finished for output in last] == [True, False]
    assert engine.get_num_unfinished_requests() == 1
    assert texts(engine.step()) == {"1": "d"}
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_only_the_end_is_told_where_that_is_asked_for(make: MakeEngine) -> None:
    engine = make(FakeCore(say("abcd", EOS)))
    engine.add_request("0", "hi", SamplingParams(max_tokens=4, n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    found = [engine.step() for _ in range(4)]
    assert found[:3] == [[], [], []]
    (output,) = found[3]
    assert isinstance(output, RequestOutput)
    assert [part.text for part in output.outputs] == ["abcd", "abcd"]


def test_vectors(make: MakeEngine) -> None:
    engine = make(pooler=PoolerConfig(pooling_type="LAST", normalize=True))
    engine.add_request("v", "hi", PoolingParams())
    (output,) = engine.step()
    assert isinstance(output, PoolingRequestOutput)
    assert output.request_id == "v"
    assert not engine.has_unfinished_requests()


def test_aborted_requests_say_nothing_more(make: MakeEngine) -> None:
    engine = make(FakeCore(say("abcd", EOS)))
    for name in ("0", "1"):
        engine.add_request(name, "hi", GREEDY)
    engine.step()
    engine.abort_request("0")
    engine.abort_request(["2"], internal=False)
    assert texts(engine.step()) == {"1": "ab"}
    engine.abort_request(["1"])
    assert not engine.has_unfinished_requests()
    engine.add_request("0", "hi", GREEDY)
    assert texts(engine.step()) == {"0": "a"}


@pytest.mark.parametrize(("arguments", "message"), [
    (("0", "", GREEDY), "prompt"),
    (("", "hi", GREEDY), "request_id"),
    ((0, "hi", GREEDY), "request_id=0 is not allowed"),
    (("0", "hi", PoolingParams()), "Pooling|pooling"),
    (("taken", "hi", GREEDY), "is that of a request that is not finished"),
    (("0", "hi", GREEDY, None, "adapter"), "lora_request is not supported"),
])  # fmt: skip
def test_what_is_wrong_is_an_error_at_once(make: MakeEngine, arguments: tuple[Any, ...], message: str) -> None:
    engine = make()
    engine.add_request("taken", "hi", GREEDY)
    with pytest.raises(RequestError, match=message):
        engine.add_request(*arguments)
    assert engine.get_num_unfinished_requests() == 1
    assert len(engine.step()) == 1


def test_a_form_that_cannot_be_is_an_error_at_once(make: MakeEngine) -> None:
    engine = make()
    params = SamplingParams(structured_outputs={"regex": "(" * 5})
    with pytest.raises(RequestError):
        engine.add_request("0", "hi", params)
    assert not engine.has_unfinished_requests()


def test_other_arguments(make: MakeEngine) -> None:
    engine = make()
    with pytest.raises(TypeError, match="nothing"):
        engine.add_request("0", "hi", GREEDY, nothing=1)
    with pytest.raises(RequestError, match="stat_loggers is not supported"):
        LLMEngine.from_engine_args(EngineArgs("fake"), stat_loggers=[object()])
    assert engine.get_tokenizer() is engine.tokenizer


def test_after_shutdown_it_says_so(make: MakeEngine) -> None:
    engine = make()
    engine.add_request("0", "hi", GREEDY)
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("1", "hi", GREEDY)
