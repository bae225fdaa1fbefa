"""`TorchGroup`: a group over torch's communicators, gloo for CPU tensors and NCCL for those of a CUDA device.

The communicators are made one by one, without torch's global default group, so that a process can leave one engine
and join another, and so that gloo listens on the address it is told and on no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from pagemill.errors import DistributedError
from pagemill.model.distributed.group import Group, Transfer

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class GroupRendezvous:
    """How the ranks of an engine reach each other to form groups."""

    store: Store
    address: str
    """This host's address, as the other ranks reach it."""
    backend: str
    """One of BACKENDS; with nccl, CPU tensors still travel by gloo."""
    timeout: timedelta


class TorchTransfer(Transfer):
    """A torch work object, with the tensor that must outlive it."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        _wait(self._work)


class TorchGroup(Group):
    """`members` are global ranks, in order; `me` is this process's. Construction connects to all members."""

    def __init__(self, name: str, members: Sequence[int], me: int, rendezvous: GroupRendezvous) -> None:
        super().__init__(list(members).index(me), len(members))
        store = PrefixStore(f"{name}/{'-'.join(map(str, members))}", rendezvous.store)
        try:
            self._cpu = _gloo(PrefixStore("gloo", store), self.rank, self.size, rendezvous)
            self._device = _nccl(store, self.rank, self.size, rendezvous) if rendezvous.backend == "nccl" else self._cpu
        except RuntimeError as error:
            raise DistributedError(f"{name} group of ranks {list(members)}: {error}") from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        _wait(self._for(tensor).allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        _wait(self._for(tensor).allgather([parts], [tensor]))
        return torch.cat(parts, dim)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        _wait(self._for(tensor).broadcast(tensor, source))
        return tensor

    def isend(self, tensor: Tensor, to: int) -> Transfer:
        return TorchTransfer(self._for(tensor).send([tensor], to, 0), tensor)

    def irecv(self, tensor: Tensor, source: int) -> Transfer:
        return TorchTransfer(self._for(tensor).recv([tensor], source, 0), tensor)

    def barrier(self) -> None:
        _wait(self._cpu.barrier())

    def close(self) -> None:
        if self._device is not self._cpu:
            self._device.abort()
        self._device = self._cpu = None

    def _for(self, tensor: Tensor) -> Any:
        return self._cpu if tensor.is_cpu else self._device


def _gloo(store: Store, rank: int, size: int, rendezvous: GroupRendezvous) -> Any:
    from torch.distributed import ProcessGroupGloo  # deferred: torch builds without gloo have no such name

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = rendezvous.timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, rendezvous: GroupRendezvous) -> Any:
    from torch.distributed import ProcessGroupNCCL  # deferred: torch builds without NCCL have no such name

    options = ProcessGroupNCCL.Options()
    options._timeout = rendezvous.timeout
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise DistributedError(f"another rank is gone or does not answer: {error}") from error
