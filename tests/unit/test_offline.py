"""What an LLM can be told besides requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagemill.errors import RequestError
from pagemill.offline import OfflineControl, PrivateLoop
from pagemill.serve.other_arguments import METHODS
from tests.fakes.engine import make_engine


@pytest.fixture
def control() -> Any:
    """The controls of an engine on a fake core, whose workers answer with what they are called with."""
    control = OfflineControl()
    control._engine = make_engine()
    control._loop = PrivateLoop()
    control.config = SimpleNamespace(parallel=SimpleNamespace(workers_per_replica=2))  # type: ignore[assignment]
    yield control
    control._loop.close(control._engine.shutdown())


def test_calls_by_name(control: OfflineControl) -> None:
    assert control.collective_rpc("describe") == [["describe"]]
    assert control.get_world_size() == control.get_world_size(include_dp=False) == 2
    assert control.save_sharded_state("folder") == [["save_sharded_state", "folder", None, None]]
    control.start_profile("folder/run")
    assert control.stop_profile() == [["stop_profile"]]
    assert control.reset_prefix_cache(reset_running_requests=False) is True
    with pytest.raises(RequestError, match="reset_running_requests is not supported"):
        control.reset_prefix_cache(reset_running_requests=True)


def test_results_are_not_made_into_texts() -> None:
    """As the runner of asyncio would, to restore the handler of Ctrl-C."""

    class Result:
        def __repr__(self) -> str:
            raise AssertionError("it is large")

    async def work() -> Result:
        return Result()

    async def nothing() -> None:
        pass

    loop = PrivateLoop()
    assert isinstance(loop.run(work()), Result)
    loop.close(nothing())


@pytest.mark.parametrize(("method", "options", "message"), [
    (len, {}, "no function is sent to workers"),
    ("shutdown", {}, "method='shutdown' is not one of describe, save_sharded_state, start_profile, stop_profile"),
    ("__class__", {}, "is not one of"),
    ("describe", {"kwargs": {"x": 1}}, "kwargs and timeout are not supported"),
    ("describe", {"timeout": 1.0}, "kwargs and timeout are not supported"),
])  # fmt: skip
def test_calls_that_are_refused(control: OfflineControl, method: Any, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        control.collective_rpc(method, **options)


@pytest.mark.parametrize("name", METHODS)
def test_methods_without_counterpart_say_what_to_do(control: OfflineControl, name: str) -> None:
    assert not hasattr(control, name)
    with pytest.raises(AttributeError, match=f"^LLM.{name} is not supported: "):
        getattr(control, name)
    with pytest.raises(AttributeError, match=f"^AsyncLLM.{name} is not supported: "):
        getattr(control._engine, name)


def test_other_attributes_are_missing_as_usual(control: OfflineControl) -> None:
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'no_such'"):
        _ = control.no_such
