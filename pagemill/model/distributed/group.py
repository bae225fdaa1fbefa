"""`Group`: the collective operations of some ranks; `SoloGroup`, the group of one.

Knows nothing about what is exchanged, or why these ranks belong together.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class Transfer(ABC):
    """A send or receive under way. Whoever starts one waits for it, once."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the tensor may be reused (sent) or read (received). Raises DistributedError when the peer is
        gone or does not answer within the group's timeout."""


class Group(ABC):
    """Ranks 0..size-1, this process being `rank`. Every rank of a group calls the same operations in the same order.

    Tensors are contiguous, of equal shape and type on all ranks, on the CPU or on the group's device. Every
    operation raises DistributedError when a peer is gone or does not answer within the group's timeout.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place and bitwise the same on every rank."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, joined along `dim` in order of rank."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Rank `source`'s tensor, in place on all others."""

    @abstractmethod
    def isend(self, tensor: Tensor, to: int) -> Transfer:
        """Start to send to a rank. The tensor stays as it is until the transfer was waited for."""

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int) -> Transfer:
        """Start to receive from a rank, into the tensor. Transfers between two ranks arrive in order."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to a rank, and wait."""
        self.isend(tensor, to).wait()

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Receive from a rank, into the tensor, and wait."""
        self.irecv(tensor, source).wait()
        return tensor

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def close(self) -> None:
        """Give the connections back. The last call."""


class SoloGroup(Group):
    """The group of one: nothing to exchange, nothing to set up."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor

    def isend(self, tensor: Tensor, to: int) -> Transfer:
        raise RuntimeError(f"rank {to} does not exist in a group of one")

    def irecv(self, tensor: Tensor, source: int) -> Transfer:
        raise RuntimeError(f"rank {source} does not exist in a group of one")

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return
