from collections.abc import Callable
from typing import Any

import pytest

from pagemill.bench.scheduler.own import OwnScheduler
from pagemill.bench.scheduler.work import SchedulerWork


@pytest.fixture
def work() -> SchedulerWork:
    """The benchmark in a hundredth of its size."""
    return SchedulerWork(
        num_steps=6, num_repetitions=2, decodes=(2, 5), num_cached_blocks=400, admitted_tokens=1024, num_warmup_steps=2
    )


@pytest.fixture
def own_as_peer() -> Callable[..., Any]:
    """Our scheduler, called as the peer is: its `__init__` comes first."""
    made: list[OwnScheduler] = []

    def call(method: str, *args: Any) -> Any:
        if method != "__init__":
            return getattr(made[0], method)(*args)
        made.append(OwnScheduler(*args))
        return None

    return call
