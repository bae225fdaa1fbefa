"""Tasks that nobody awaits one by one."""

import asyncio

from pagemill.utils.tasks import TaskSet


async def test_tasks_run_and_those_that_are_left_are_cancelled() -> None:
    tasks = TaskSet()
    done: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            done.append(f"{name} was cancelled")
            raise
        done.append(name)

    await tasks.spawn(work("short", 0))
    long = tasks.spawn(work("long", 3600))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert long.cancelled()
    assert done == ["short", "long was cancelled"]
