"""An AsyncLLM as scripts for vLLM use it, besides its streams."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.errors import EngineDeadError, RequestError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.async_llm import AsyncLLM
from tests.fakes.engine import make_engine
from tests.fakes.fake_core import FakeCore


async def test_from_engine_args(monkeypatch: pytest.MonkeyPatch) -> None:
    launch: Any = ModuleType("pagemill.launch")
    launch.build_inproc = lambda args: SimpleNamespace(llm=make_engine(), args=args)
    monkeypatch.setitem(sys.modules, "pagemill.launch", launch)
    engine = AsyncLLM.from_engine_args(EngineArgs("m"))
    assert await engine.get_tokenizer() is engine.tokenizer
    assert await engine.is_tracing_enabled() is False
    await engine.check_health()
    assert engine.is_running
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.check_health()


async def test_calls_by_name() -> None:
    engine = make_engine()
    assert await engine.collective_rpc("describe") == [["describe"]]
    await engine.start_profile()
    assert await engine.stop_profile() == [["stop_profile"]]
    assert await engine.reset_prefix_cache(reset_connector=False)
    await engine.shutdown()


async def test_requests_with_arguments_of_vllm() -> None:
    core = FakeCore(step_s=0.001)
    engine = make_engine(core)
    params = SamplingParams(max_tokens=100)
    first = engine.generate("hello", params, "one", lora_request=None, trace_headers=None, priority=0)
    second = engine.generate("world", params, request_id="two", tokenization_kwargs={})
    await anext(first)
    await anext(second)
    await engine.abort(["one", "two", "three"])
    for stream in (first, second):
        *_, last = [output async for output in stream]
        assert last.outputs[0].finish_reason == "abort"
    assert len(core.aborted) == 2
    with pytest.raises(RequestError, match="lora_request is not supported"):
        await anext(engine.generate("hello", params, "four", lora_request=object()))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        await anext(engine.encode("hello", nothing=1))
    await engine.shutdown()
