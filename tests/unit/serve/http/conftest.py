"""An HTTP client on an app in this process, and one on a real server."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from pagemill.serve.processing import forms
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore
from tests.fakes.shared_checker import Factory, sharing_checkers

Connect = Callable[..., Any]


@pytest.fixture(scope="session")
def checkers() -> Iterator[Factory]:
    """What makes the checkers of grammars that engines share."""
    with sharing_checkers() as make:
        yield make


@pytest.fixture(autouse=True)
def _one_process_that_checks_grammars(checkers: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "GrammarChecker", checkers)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect(core, scheduler={...}, **server)` -> a client of an app around that core."""
    async with AsyncExitStack() as stack:

        async def make(
            core: FakeCore | None = None, scheduler: dict[str, Any] | None = None, **server: Any
        ) -> httpx.AsyncClient:
            engine = make_engine(core, **(scheduler or {}))
            stack.push_async_callback(engine.shutdown)
            transport = httpx.ASGITransport(make_app(engine, **server), raise_app_exceptions=True)
            return await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))

        yield make
