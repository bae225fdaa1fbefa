"""`make_worker`: a `Worker`, whose device and compiler are got ready while torch is imported. Knows nothing about what
workers do.
"""

from typing import TYPE_CHECKING

from pagemill.config.engine_config import EngineConfig
from pagemill.messages.worker_rank import SOLO_RANK, WorkerRank
from pagemill.model.kernels.triton import early
from pagemill.platforms.choose import choose_platform

if TYPE_CHECKING:
    from pagemill.worker.worker import Worker  # deferred: torch


def make_worker(config: EngineConfig, rank: WorkerRank = SOLO_RANK) -> "Worker":
    """The worker of this rank, in the process that will use its device. Raises ConfigError where there is no such
    device, or not as many workers as the configuration asks for."""
    platform = choose_platform(config.device.device)
    platform.prepare(rank.local_rank)
    if platform.torch_device().startswith("cuda"):
        early.begin()
    from pagemill.worker.worker import Worker  # deferred: torch, which takes a second and more to import

    return Worker(config, rank, platform)
