"""`DirectTransfers`: for devices that compute in the host's memory, at once. Knows no queue."""

import torch
from torch import Tensor

from pagemill.platforms.interface import Mark, Transfers


class Reached:
    """A mark that was reached before it was made."""

    def reached(self) -> bool:
        """True: nothing is queued."""
        return True

    def wait(self) -> None:
        """Return at once: nothing is queued."""


class DirectTransfers(Transfers):
    """Plain copies, done when the call returns."""

    def host_buffer(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> Mark:
        target.copy_(source)
        return Reached()

    def mark(self) -> Mark:
        return Reached()

    def finish(self) -> None:
        pass
