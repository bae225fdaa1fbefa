"""Which rank is which, and numbers that contradict each other."""

import msgspec
import pytest

from pagemill.errors import ConfigError
from pagemill.messages.worker_rank import SOLO_RANK, WorkerRank


def rank(**changes):
    fields = {"rank": 3, "local_rank": 3, "world_size": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return WorkerRank(**(fields | {"init_address": "tcp://127.0.0.1:1"} | changes))


def test_tensor_parallel_ranks_are_innermost():
    assert [(rank(rank=i).stage, rank(rank=i).tp_rank) for i in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [i for i in range(4) if rank(rank=i).returns_output] == [2]
    assert SOLO_RANK.returns_output


def test_it_travels_as_message_pack():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rank()), type=WorkerRank) == rank()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "rank=4 is not in 0 <= rank < 4"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 5}, "world_size=5 is not tensor_parallel_size x pipeline_parallel_size"),
        ({"tensor_parallel_size": 0, "world_size": 0}, "world_size=0"),
        ({"local_rank": -1}, "local_rank=-1 is negative"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        rank(**changes)


def test_replicas_come_one_after_the_other():
    second = rank(rank=1, replica=1, num_replicas=2)
    assert (second.global_rank, second.tp_rank, second.stage) == (5, 1, 0)
    with pytest.raises(ConfigError, match="replica=2 is not in 0 <= replica < 2"):
        rank(replica=2, num_replicas=2)
