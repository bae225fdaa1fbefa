"""`Part`: which range of a checkpoint tensor a rank reads. Knows neither formats nor layers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """start <= index < stop of one dimension, everything of the others."""

    dim: int
    start: int
    stop: int
    as_stored: bool = False
    """Whether a quantized tensor may come as the file's blocks (`BlockTensor`), where the part is whole ones."""

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is the whole tensor."""
        return not shape or self.stop - self.start == shape[self.dim]

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the part."""
        return (
            tensor if self.covers(tuple(tensor.shape)) else tensor.narrow(self.dim, self.start, self.stop - self.start)
        )


Select = Callable[[str, tuple[int, ...]], Part | None]
"""(checkpoint name, shape) -> what to read of a tensor; None: nothing."""


def whole(name: str, shape: tuple[int, ...]) -> Part:
    """Selects all of every tensor."""
    return Part(0, 0, shape[0] if shape else 1)
