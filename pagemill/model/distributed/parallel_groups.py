"""`ParallelGroups`: the groups that one rank belongs to, and how ranks are laid out. Knows no transport.

    rank = (replica * pp + stage) * tp + tp_rank

Tensor-parallel ranks are innermost, for they talk most: they are neighbours on one host. Stages come next, replicas
of a data-parallel engine last.
"""

from dataclasses import dataclass

from pagemill.errors import ConfigError
from pagemill.model.distributed.group import Group, SoloGroup


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks of each kind. Raises ConfigError for a size below 1."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1:
            raise ConfigError(f"{self} has a size below 1")

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Members:
    """The global ranks of each group that one rank is in, in group order."""

    tp: tuple[int, ...]
    """The same stage of the same replica: each holds a part of every layer."""
    pp: tuple[int, ...]
    """The stages of a replica with the same tp_rank: each holds some layers."""
    dp: tuple[int, ...]
    """The replicas' ranks that hold the same weights."""
    ep: tuple[int, ...]
    """All ranks of a stage, over tp and dp: experts are spread over them."""


def members_of(rank: int, sizes: ParallelSizes) -> Members:
    """The groups of a global rank. Raises ConfigError for a rank that the sizes do not have."""
    if not 0 <= rank < sizes.world_size:
        raise ConfigError(f"rank={rank} is not in 0 <= rank < {sizes.world_size} of {sizes}")
    (rest, tp_rank), (replica, stage) = divmod(rank, sizes.tp), divmod(rank // sizes.tp, sizes.pp)

    def at(replica: int, stage: int, tp_rank: int) -> int:
        return (replica * sizes.pp + stage) * sizes.tp + tp_rank

    return Members(
        tp=tuple(rest * sizes.tp + other for other in range(sizes.tp)),
        pp=tuple(at(replica, other, tp_rank) for other in range(sizes.pp)),
        dp=tuple(at(other, stage, tp_rank) for other in range(sizes.dp)),
        ep=tuple(at(other, stage, peer) for other in range(sizes.dp) for peer in range(sizes.tp)),
    )


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one rank; a group of one is a `SoloGroup`."""

    tp: Group
    pp: Group
    """Its rank is the pipeline stage."""
    dp: Group
    ep: Group

    def close(self) -> None:
        """Give all connections back."""
        for group in {id(group): group for group in (self.ep, self.dp, self.pp, self.tp)}.values():
            group.close()


def solo_groups() -> ParallelGroups:
    """The groups of the only rank."""
    alone = SoloGroup()
    return ParallelGroups(alone, alone, alone, alone)
