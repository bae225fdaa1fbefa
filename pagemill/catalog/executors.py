"""Executors: name for --distributed-executor-backend -> class with `build(ExecutorSpec) -> Executor`."""

from typing import Any

from pagemill.catalog.registry import Registry

UNI = "uni"
MP = "mp"
RAY = "ray"
"""Names that other modules compare; plug-ins add more to the table."""

EXECUTORS: Registry[Any] = Registry(
    "executor",
    {
        UNI: "pagemill.engine.executor.uniproc:UniprocExecutor",
        MP: "pagemill.engine.executor.multiproc:MultiprocExecutor",
        RAY: "pagemill.engine.executor.ray:RayExecutor",
    },
)
