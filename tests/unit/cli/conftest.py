"""Fixtures of the command line's tests: a launch module that starts nothing, and a server with scripted answers."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes.async_llm import FakeLLM
from tests.fakes.openai_server import FakeOpenAIServer


class FakeLaunch(ModuleType):
    """Stands in for pagemill.launch and pagemill.fleet.serve."""

    def __init__(self) -> None:
        super().__init__("pagemill.launch")
        self.llm = FakeLLM()
        self.engine_args: list[Any] = []
        self.server: Any = None
        self.fleet: Any = None
        self.code = 0

    def serve(self, engine_args: Any, server: Any, fleet: Any) -> int:
        self.engine_args.append(engine_args)
        self.server, self.fleet = server, fleet
        return self.code

    def build_inproc(self, engine_args: Any) -> SimpleNamespace:
        self.engine_args.append(engine_args)
        return SimpleNamespace(llm=self.llm)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("PAGEMILL", "VLLM"):
        for name in ("API_KEY", "LOGGING_LEVEL"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch()
    for name in ("pagemill.launch", "pagemill.fleet.serve"):
        monkeypatch.setitem(sys.modules, name, fake)
    return fake


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server
