"""Which executor a configuration asks for. Knows nothing about what executors do."""

from pagemill.config.engine_config import EngineConfig
from pagemill.engine.executor.interface import Executor
from pagemill.engine.executor.uniproc import UniprocExecutor


def make_executor(config: EngineConfig, worker: str) -> Executor:
    """An executor with its workers up and their models loaded; `worker` is "module:callable", called with the
    configuration."""
    return UniprocExecutor(worker, config, overlap=bool(config.scheduler.async_scheduling))
