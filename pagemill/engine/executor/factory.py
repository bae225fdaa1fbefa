"""Which executor a configuration asks for; only that one is imported. Knows nothing about what executors do."""

from pagemill.config.engine_config import EngineConfig
from pagemill.engine.executor.interface import Executor
from pagemill.errors import ConfigError
from pagemill.messages.worker_rank import Replicas, ranks_of


def make_executor(config: EngineConfig, worker: str, *, replica: int = 0, replicas: Replicas | None = None) -> Executor:
    """An executor with its workers up and their models loaded; `worker` is "module:callable", called with the
    configuration, and with the rank where there are several. `replica` counts engines with workers of their own;
    `replicas` says where they all meet, if they do. Raises ConfigError for workers on a cluster that shall meet."""
    overlap, parallel = bool(config.scheduler.async_scheduling), config.parallel
    if parallel.distributed_executor_backend == "uni":
        ranks = () if replicas is None else ranks_of(1, 1, "", replicas)
        from pagemill.engine.executor.uniproc import UniprocExecutor  # deferred, as all: two of three are not needed

        return UniprocExecutor(worker, config, *ranks, overlap=overlap)
    if parallel.distributed_executor_backend == "ray" and replicas is not None:
        raise ConfigError(
            "enable_expert_parallel=True deals out experts over several engines on one machine only; "
            "distributed_executor_backend='ray' is not allowed with it: use --distributed-executor-backend mp"
        )
    if parallel.distributed_executor_backend == "ray":
        from pagemill.engine.executor.ray import RayExecutor  # deferred, as above

        return RayExecutor(
            worker,
            config,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            per_worker={"CPU": config.cpu.cpu_threads or 1},
            overlap=overlap,
            first_index=replica * parallel.workers_per_replica,
        )
    from pagemill.engine.executor.multiproc import MultiprocExecutor  # deferred, as above

    return MultiprocExecutor(
        worker,
        config,
        replicas=replicas,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        overlap=overlap,
        first_index=replica * parallel.workers_per_replica,
    )
