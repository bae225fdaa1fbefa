"""What a CUDA device offers a runner: copies on streams of their own, and its memory in bytes.

Knows nothing about what is copied.
"""

from typing import Any

import torch
from torch import Tensor

from pagemill.platforms.interface import Mark, Transfers


class EventMark:
    """A place in the queue of a device: a CUDA event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def reached(self) -> bool:
        """Whether the event has happened."""
        done: bool = self.event.query()
        return done

    def wait(self) -> None:
        """Spin until it has: a step is shorter than the operating system's sleep."""
        self.event.synchronize()


class CudaTransfers(Transfers):
    """One stream brings, one takes away; the main stream waits for an upload on the device, the host never."""

    def __init__(self) -> None:
        self._bring = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._take = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def host_buffer(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._bring):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_event(EventMark(self._bring).event)

    def download(self, target: Tensor, source: Tensor) -> Mark:
        self._take.wait_event(EventMark(torch.cuda.current_stream()).event)
        with torch.cuda.stream(self._take):
            target.copy_(source, non_blocking=True)
        return EventMark(self._take)

    def mark(self) -> Mark:
        return EventMark(torch.cuda.current_stream())

    def finish(self) -> None:
        torch.cuda.synchronize()


class CudaMemory:
    """Of the current device."""

    def __init__(self, others: int) -> None:
        self._others = others

    def others(self) -> int:
        """As it was found."""
        return self._others

    def total(self) -> int:
        """As the driver says."""
        return int(torch.cuda.mem_get_info()[1])

    def free(self) -> int:
        """As the driver says."""
        return int(torch.cuda.mem_get_info()[0])

    def allocated(self) -> int:
        """By torch's allocator."""
        return int(torch.cuda.memory_allocated())

    def reserved(self) -> int:
        """By torch's allocator."""
        return int(torch.cuda.memory_reserved())

    def peak(self) -> int:
        """Of `reserved`: what lies between tensors is taken too."""
        return int(torch.cuda.max_memory_reserved())

    def restart_peak(self) -> None:
        """Measure the peak from here on."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
