"""Which executor a configuration asks for; only that one is imported. Knows nothing about what executors do."""

from pagemill.catalog.executors import EXECUTORS
from pagemill.config.engine_config import EngineConfig
from pagemill.engine.executor.interface import Executor, ExecutorSpec
from pagemill.messages.worker_rank import Replicas


def make_executor(config: EngineConfig, worker: str, *, replica: int = 0, replicas: Replicas | None = None) -> Executor:
    """An executor with its workers up and their models loaded; `worker` is "module:callable", called with the
    configuration, and with the rank where there are several. `replica` counts engines with workers of their own;
    `replicas` says where they all meet, if they do. Raises ConfigError for a name that the catalogue does not have, and
    for what the executor cannot do."""
    spec = ExecutorSpec(
        worker,
        config,
        config.parallel,
        num_threads=config.cpu.cpu_threads,
        overlap=config.scheduler.async_scheduling,
        replica=replica,
        replicas=replicas,
    )
    executor: Executor = EXECUTORS.resolve(config.parallel.distributed_executor_backend).build(spec)
    return executor
