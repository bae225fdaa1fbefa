"""The layout of ranks, and the groups of the only rank."""

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.messages.worker_rank import WorkerRank
from pagemill.model.distributed.init import init_distributed
from pagemill.model.distributed.parallel_groups import ParallelSizes, members_of, solo_groups


def test_tensor_parallel_ranks_are_neighbours_and_replicas_far_apart():
    sizes = ParallelSizes(tp=2, pp=3, dp=2)
    members = members_of(9, sizes)
    assert members.tp == (8, 9)
    assert members.pp == (7, 9, 11)
    assert members.dp == (3, 9)
    assert members.ep == (2, 3, 8, 9)


@pytest.mark.parametrize(
    "sizes", [ParallelSizes(2, 3, 2), ParallelSizes(4), ParallelSizes(1, 4), ParallelSizes(1, 1, 3)]
)
def test_groups_partition_the_world(sizes):
    everyone = list(range(sizes.world_size))
    for kind, size in (("tp", sizes.tp), ("pp", sizes.pp), ("dp", sizes.dp), ("ep", sizes.tp * sizes.dp)):
        groups = {getattr(members_of(rank, sizes), kind) for rank in everyone}
        assert sorted(rank for group in groups for rank in group) == everyone
        assert {len(group) for group in groups} == {size}
        assert all(rank in getattr(members_of(rank, sizes), kind) for rank in everyone)


def test_the_layout_is_that_of_the_message():
    sizes = ParallelSizes(tp=2, pp=3)
    for rank in range(6):
        message = WorkerRank(
            rank=rank,
            local_rank=rank,
            world_size=6,
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
            init_address="",
        )
        members = members_of(rank, sizes)
        assert (members.tp.index(rank), members.pp.index(rank)) == (message.tp_rank, message.stage)
        assert message.returns_output == (rank == members.tp[0] and rank == members.pp[-1])


def test_bad_numbers_are_named():
    with pytest.raises(ConfigError, match="rank=4 is not in 0 <= rank < 4"):
        members_of(4, ParallelSizes(4))
    with pytest.raises(ConfigError, match="size below 1"):
        ParallelSizes(tp=0)


def test_the_only_rank_sets_nothing_up():
    groups = init_distributed(0, 1, 0, "", "gloo", ParallelSizes())
    tensor = torch.ones(2)
    assert groups.tp.all_reduce(tensor) is tensor
    assert groups.tp.all_gather(tensor) is tensor
    assert groups.pp.broadcast(tensor, 0) is tensor
    groups.ep.barrier()
    with pytest.raises(RuntimeError, match="rank 1 does not exist in a group of one"):
        groups.pp.send(tensor, 1)
    groups.close()
    assert not torch.distributed.is_initialized()
    solo_groups().close()
