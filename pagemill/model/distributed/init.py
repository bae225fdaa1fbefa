"""`init_distributed`: from a rank's numbers to its connected groups."""

from collections.abc import Sequence
from datetime import timedelta

import torch

from pagemill.errors import ConfigError
from pagemill.model.distributed.group import Group, SoloGroup
from pagemill.model.distributed.parallel_groups import ParallelGroups, ParallelSizes, members_of, solo_groups
from pagemill.model.distributed.rendezvous import meet
from pagemill.model.distributed.torch_group import BACKENDS, GroupRendezvous, TorchGroup

TIMEOUT_S = 300.0
"""For all ranks to come, and for a peer to answer. Longer than importing torch from a cold disk takes."""


def init_distributed(
    rank: int,
    world_size: int,
    local_rank: int,
    init_method: str,
    backend: str,
    sizes: ParallelSizes,
    *,
    timeout_s: float = TIMEOUT_S,
) -> ParallelGroups:
    """Meet the other ranks at `init_method` (tcp://HOST:PORT or file://PATH) and connect to them.

    `backend`: gloo, or nccl for CUDA devices, of which this rank takes number `local_rank`. A world of one needs no
    rendezvous and gets groups of one. Raises ConfigError for numbers that contradict each other, DistributedError that
    names the ranks that did not come within `timeout_s` seconds.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    if world_size != sizes.world_size:
        raise ConfigError(f"world_size={world_size} is not the {sizes.world_size} ranks of {sizes}")
    members = members_of(rank, sizes)
    if world_size == 1:
        return solo_groups()
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    store, address = meet(rank, world_size, init_method, timeout_s)
    rendezvous = GroupRendezvous(store, address, backend, timedelta(seconds=timeout_s))

    def group(name: str, ranks: Sequence[int]) -> Group:
        return SoloGroup() if len(ranks) == 1 else TorchGroup(name, ranks, rank, rendezvous)

    tp = group("tp", members.tp)
    pp = group("pp", members.pp)
    dp = group("dp", members.dp)
    # With one replica, or one rank in each, a stage's ranks are connected already.
    known = {members.tp: tp, members.dp: dp}
    return ParallelGroups(tp, pp, dp, known[members.ep] if members.ep in known else group("ep", members.ep))
