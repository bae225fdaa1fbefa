"""`WorkerRank`: which of an engine's workers a process is, and where it meets the others.

Knows nothing about process groups (model/distributed) or about who starts the processes (engine/executor).
"""

import msgspec

from pagemill.errors import ConfigError


class Replicas(msgspec.Struct, frozen=True):
    """One engine's place among those over which the experts of a model are dealt out."""

    replica: int
    num_replicas: int
    address: str
    """Where the workers of all of them meet, as `WorkerRank.init_address`."""


class WorkerRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one replica. Tensor-parallel ranks are innermost: rank = stage * tensor_parallel_size + tp_rank.

    Raises ConfigError for numbers that contradict each other.
    """

    rank: int
    """0 <= rank < world_size."""
    local_rank: int
    """Index among the workers of this host: the device that the worker takes."""
    world_size: int
    """Workers of the replica: tensor_parallel_size * pipeline_parallel_size."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    init_address: str
    """Where the ranks meet: tcp://HOST:PORT, or file://PATH (a file that does not exist yet) on one host. Unused,
    and may be empty, when world_size and num_replicas are 1."""
    replica: int = 0
    num_replicas: int = 1
    """Engines whose workers all meet there, as their experts are dealt out over all of them."""

    def __post_init__(self) -> None:
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size
        if min(sizes) < 1 or self.world_size != sizes[0] * sizes[1]:
            raise ConfigError(
                f"world_size={self.world_size} is not tensor_parallel_size x pipeline_parallel_size {sizes}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is not in 0 <= rank < {self.world_size}")
        if self.local_rank < 0:
            raise ConfigError(f"local_rank={self.local_rank} is negative")
        if not 0 <= self.replica < self.num_replicas:
            raise ConfigError(f"replica={self.replica} is not in 0 <= replica < {self.num_replicas}")

    @property
    def global_rank(self) -> int:
        """Rank among the workers of all replicas."""
        return self.replica * self.world_size + self.rank

    @property
    def tp_rank(self) -> int:
        """Rank among those that share the layers of a stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Number of the rank's pipeline stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def returns_output(self) -> bool:
        """Whether this rank's ModelRunnerOutput is the engine's: rank 0 of the last stage."""
        return self.rank == self.world_size - self.tensor_parallel_size


SOLO_RANK = WorkerRank(
    rank=0, local_rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, init_address=""
)
"""The only worker of an engine."""


def ranks_of(
    tensor_parallel_size: int, pipeline_parallel_size: int, init_address: str, replicas: Replicas | None = None
) -> list[WorkerRank]:
    """All workers of an engine on one host; with `replicas`, one of several on it that meet."""
    world_size = tensor_parallel_size * pipeline_parallel_size
    first = 0 if replicas is None else replicas.replica * world_size
    return [
        WorkerRank(
            rank=rank,
            local_rank=first + rank,
            world_size=world_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            init_address=init_address if replicas is None else replicas.address,
            replica=0 if replicas is None else replicas.replica,
            num_replicas=1 if replicas is None else replicas.num_replicas,
        )
        for rank in range(world_size)
    ]
