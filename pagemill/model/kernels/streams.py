"""Functions of rows in which several streams of hidden states lie side by side (AltUp), and of the MLPs that come with
them: in torch, and as operations of native code on a CPU in bfloat16.

Letters in shapes: T tokens, S streams, E elements of each. Knows nothing about layers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels.mirrors import Op
from pagemill.model.kernels.native import library
from pagemill.model.kernels.run_operations import run_operations

STREAMS = 13
"""The kind of operation of a plan."""
NO_BUFFER = -1
_LEAST = 1e-5
"""Of a stream's mean square, when it is scaled to another's."""


class Stream(IntEnum):
    """What an operation does, as PmStream in cpu/kernels.h."""

    PLACE = 1
    PICK = 2
    MIX = 3
    CORRECT = 4
    ADD_TO_OTHERS = 5
    MEAN = 6
    BOUND = 7
    SPARSE_GATE = 8
    WEIGH = 9


@dataclass(frozen=True)
class StreamStep:
    """One operation of native code."""

    kind: Stream
    inputs: tuple[int, ...]
    """One to three of the function's inputs, by number."""
    column: int = 0
    num_streams: int = 1
    factor: float = 0.0
    weight: Tensor | None = None

    def operation(self, inputs: Sequence[int], out: int) -> Op:
        """For a plan with these buffers."""
        first, second, third = (*(inputs[place] for place in self.inputs), NO_BUFFER, NO_BUFFER)[:3]
        return Op(
            kind=STREAMS,
            input=first,
            residual_in=second,
            third_in=third,
            out=out,
            residual_out=NO_BUFFER,
            stream=self.kind,
            columns=self.column,
            num_streams=self.num_streams,
            factor=self.factor,
            weight=None if self.weight is None else self.weight.data_ptr(),
        )


class StreamFunction(ABC):
    """Of [T, ...] tensors of one type, a tensor [T, ...] of that type: each row of those rows."""

    @abstractmethod
    def in_torch(self, *tensors: Tensor) -> Tensor:
        """What it is, by operations of torch, on any device."""

    @abstractmethod
    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        """Of a row of the result, by those of the rows that it is given."""

    @abstractmethod
    def steps(self, *widths: int) -> Iterator[StreamStep]:
        """The same as operations of native code, by the numbers of elements of the rows that it is given."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        first = tensors[0]
        on_cpu = first.is_cpu and first.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
        return self._natively(*tensors) if on_cpu and library() is not None else self.in_torch(*tensors)

    def _natively(self, *tensors: Tensor) -> Tensor:
        rows = [tensor.contiguous() for tensor in tensors]
        shape = self.shape(*(tensor.shape[1:] for tensor in rows))
        out = torch.empty(len(rows[0]), *shape, dtype=torch.bfloat16)
        steps = list(self.steps(*(math.prod(tensor.shape[1:]) for tensor in rows)))
        run_operations([step.operation(range(len(rows)), len(rows)) for step in steps], [*rows, out])
        return out


class SideBySide(StreamFunction):
    """[T, E], and others, which are scaled to its mean square -> [T, S, E]."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        first, *others = tensors
        return torch.stack([first, *(_as_large(other, first) for other in others)], dim=1)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return len(shapes), *shapes[0]

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.PLACE, (0,))
        for index in range(1, len(widths)):
            yield StreamStep(Stream.PLACE, (index, 0), column=index * widths[0])


@dataclass(frozen=True)
class MeanOfStreams(StreamFunction):
    """[T, S, E] -> [T, E]."""

    count: int
    """S."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        return tensors[0].mean(1)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0][1:])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.MEAN, (0,), num_streams=self.count)


@dataclass(frozen=True)
class OneOfStreams(StreamFunction):
    """[T, S, E] -> [T, E], times a weight where there is one."""

    count: int
    """S."""
    index: int
    scale: Callable[[], Tensor | None] = lambda: None
    """[E], of the streams' type, once weights are loaded."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        one = tensors[0][:, self.index].contiguous()
        scale = self.scale()
        return one if scale is None else one * scale

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0][1:])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        size = widths[0] // self.count
        yield StreamStep(Stream.PICK, (0,), column=self.index * size, weight=self.scale())


@dataclass(frozen=True)
class MixedStreams(StreamFunction):
    """Streams [T, S, E], and coefficients [T, S * S] -> [T, S, E]: each stream, and the sum of all times its
    coefficients."""

    count: int
    """S."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        streams, coefficients = tensors
        return streams + torch.bmm(coefficients.view(-1, self.count, self.count), streams)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.MIX, (0, 1), num_streams=self.count)


@dataclass(frozen=True)
class CorrectedStreams(StreamFunction):
    """Predictions [T, S, E], what was computed of one stream, [T, E], and coefficients [T, S] -> [T, S, E]: by what is
    new there, all streams are corrected."""

    count: int
    """S."""
    active: int
    """The stream that was computed."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        predictions, computed, coefficients = tensors
        news = (computed - predictions[:, self.active]).unsqueeze(1)
        return predictions + news * (coefficients + 1.0).unsqueeze(2)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.CORRECT, (0, 1, 2), column=self.active * widths[1], num_streams=self.count)


@dataclass(frozen=True)
class AddedToOthers(StreamFunction):
    """[T, S, E], [T, E] -> [T, S, E]: added to all streams but the first."""

    count: int
    """S."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        streams, more = tensors
        return torch.cat([streams[:, :1], streams[:, 1:] + more.unsqueeze(1)], dim=1)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.ADD_TO_OTHERS, (0, 1), num_streams=self.count)


@dataclass(frozen=True)
class Bounded(StreamFunction):
    """tanh(x / limit) of each element, computed in float32."""

    limit: float

    def in_torch(self, *tensors: Tensor) -> Tensor:
        return torch.tanh(tensors[0].float() / self.limit).to(tensors[0].dtype)

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.BOUND, (0,), factor=self.limit)


@dataclass(frozen=True)
class SparseGate(StreamFunction):
    """[T, 2 * I] -> [T, I]: GELU, in its tanh form, of what each gate, of the first half, is above mean + deviations *
    deviation of the row's, or of 0; times the second half."""

    deviations: float
    mean: Callable[[Tensor], Tensor] | None = None
    """Of gates [T, I], of which this rank has a part, [T, 1]; None: they are all here."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        return super().__call__(*tensors) if self.mean is None else self.in_torch(*tensors)

    def in_torch(self, *tensors: Tensor) -> Tensor:
        gate, up = tensors[0].chunk(2, dim=-1)
        wide = gate.float()
        mean_of = self.mean or _mean
        mean = mean_of(wide)
        deviation = mean_of((wide - mean).square()).sqrt()
        above = functional.relu(wide - (mean + deviation * self.deviations)).to(gate.dtype)
        return functional.gelu(above, approximate="tanh") * up

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return (shapes[0][0] // 2,)

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.SPARSE_GATE, (0,), factor=self.deviations)


class WeighedRows(StreamFunction):
    """[T, E], logits [T, 1] -> [T, E]: each row times the sigmoid of its logit."""

    def in_torch(self, *tensors: Tensor) -> Tensor:
        x, logits = tensors
        return x * logits.sigmoid()

    def shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def steps(self, *widths: int) -> Iterator[StreamStep]:
        yield StreamStep(Stream.WEIGH, (0, 1))


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """x, [T, E], of the mean square that another one has."""
    wanted = other.float().square().mean(-1, keepdim=True)
    found = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST)
    return (x * torch.sqrt(wanted / found)).to(x.dtype)
