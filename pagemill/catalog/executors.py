"""Executors: name for --distributed-executor-backend -> class with `build(ExecutorSpec) -> Executor`."""

from typing import Any

from pagemill.catalog.registry import Registry

EXECUTORS: Registry[Any] = Registry(
    "executor",
    {
        "uni": "pagemill.engine.executor.uniproc:UniprocExecutor",
        "mp": "pagemill.engine.executor.multiproc:MultiprocExecutor",
        "ray": "pagemill.engine.executor.ray:RayExecutor",
    },
)
