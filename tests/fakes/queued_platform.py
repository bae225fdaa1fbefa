"""A CPU that behaves like a device with a queue: copies to the host arrive only when they are waited for, host memory
is read late, and memory of copies that are over is spoiled."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pagemill.config.facts import DeviceFacts
from pagemill.platforms.cpu import CpuPlatform
from pagemill.platforms.interface import Transfers
from tests.fakes.fake_graphs import FakeGraphMaker

SPOILED = -123_456


class QueuedMark:
    """`arrive` brings what was asked for."""

    def __init__(self, transfers: "QueuedTransfers", arrive: Callable[[], object] | None = None) -> None:
        self._transfers = transfers
        self._arrive = arrive
        transfers.open.append(self)

    def reached(self) -> bool:
        return self._arrive is None

    def wait(self) -> None:
        while not self.reached():
            self._transfers.open.pop(0).finish()

    def finish(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


class QueuedTransfers(Transfers):
    """Downloads are taken when asked for (as the work queued until then leaves them) and arrive when waited for."""

    def __init__(self) -> None:
        self.open: list[QueuedMark] = []
        self.num_uploads = self.num_waits = 0

    def host_buffer(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def upload(self, target: Tensor, source: Tensor) -> None:
        self.num_uploads += 1
        target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> QueuedMark:
        taken = source.clone()
        target.fill_(SPOILED)

        def arrive() -> None:
            target.copy_(taken)

        return QueuedMark(self, arrive)

    def mark(self) -> QueuedMark:
        return QueuedMark(self, lambda: None)

    def finish(self) -> None:
        while self.open:
            self.open.pop(0).finish()


class FixedMemory:
    """A device of 10,000,000 bytes, of which steps have taken `taken` at most."""

    def __init__(self, taken: int = 3_000_000, used_by_others: int = 0) -> None:
        self.taken, self.used_by_others = taken, used_by_others

    def total(self) -> int:
        return 10_000_000

    def free(self) -> int:
        return self.total() - self.used_by_others - self.taken - 500_000

    def others(self) -> int:
        return self.used_by_others

    def allocated(self) -> int:
        return 1_000_000

    def reserved(self) -> int:
        return self.taken

    def peak(self) -> int:
        return self.taken

    def restart_peak(self) -> None:
        pass


class QueuedPlatform(CpuPlatform):
    """`graphs`: whether steps are captured."""

    runs_ahead = True

    def __init__(self, graphs: bool = True, memory: FixedMemory | None = None) -> None:
        self.own_memory = memory
        self.maker = FakeGraphMaker() if graphs else None
        self.made = QueuedTransfers()

    def memory(self) -> FixedMemory | None:
        return self.own_memory

    def facts(self) -> DeviceFacts:
        return dataclasses.replace(super().facts(), runs_ahead=True, captures=self.maker is not None)

    def attention_order(self) -> tuple[str, ...]:
        return ("TORCH_PAGED",)

    def transfers(self) -> QueuedTransfers:
        return self.made

    def graph_maker(self) -> FakeGraphMaker | None:
        return self.maker
