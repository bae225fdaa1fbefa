"""Graphs on the CPU, as close to CUDA's as it gets: what is recorded has no effect until it is replayed, a replay
reads and writes the addresses of the recording, and results hold garbage before it. What the host would have to wait
for cannot be recorded: a replay would not ask the host again."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ASKS = "operation not permitted when stream is capturing"
"""What CUDA says when the host asks for a value, or for the size of a result that depends on values."""
READS = (Tensor.tolist, Tensor.numpy)
"""They reach no operation that could be recorded."""


class FakeGraphMaker:
    """Counts what happens. `room`: graphs that fit the memory."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.graphs: list[FakeGraph] = []
        self.room = room

    def graph(self) -> "FakeGraph":
        self.graphs.append(FakeGraph(fails=len(self.graphs) >= self.room))
        return self.graphs[-1]

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor.view(tensor.shape)

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class _NoReads(TorchFunctionMode):
    """Refuses `READS`."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in READS:
            raise RuntimeError(ASKS)
        return func(*args, **(kwargs or {}))


class FakeGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, undoes what they did, and does it again."""

    open: "FakeGraph | None" = None

    def __init__(self, fails: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_replays = 0
        self._fails = fails
        self._reads = _NoReads()
        self._ops: list[tuple[Any, tuple[object, ...], dict[str, object], object]] = []
        self._undo: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        assert FakeGraph.open is None, "recordings do not nest"
        FakeGraph.open = self
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._leave()
        for func, _, _, result in self._ops:
            if all(returned.alias_info is None for returned in func._schema.returns):
                pytree.tree_map_only(Tensor, _spoil, result)
        for tensor, before in reversed(self._undo):
            tensor.copy_(before)
        self._undo.clear()
        self._ops = [op for op in self._ops if not _only_views(op[0], op[1], op[3])]

    def abort(self) -> None:
        self._leave()
        for tensor, before in reversed(self._undo):
            tensor.copy_(before)

    def replay(self) -> None:
        assert FakeGraph.open is None, "no replay while something is recorded"
        self.num_replays += 1
        for func, args, kwargs, result in self._ops:
            found = func(*args, **kwargs)
            if isinstance(result, Tensor):
                _bring(result, found)
                continue
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(found), strict=True):
                if isinstance(old, Tensor):
                    _bring(old, new)

    def _leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        FakeGraph.open = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._fails:
            raise torch.OutOfMemoryError("no room")
        if _asks(func, args):
            raise RuntimeError(ASKS)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor):
                self._undo.append((value, value.clone()))
        for argument in func._schema.arguments:
            if argument.is_write and isinstance(kwargs.get(argument.name), Tensor):
                self._undo.append((kwargs[argument.name], kwargs[argument.name].clone()))
        result = func(*args, **kwargs)
        self._ops.append((func, args, kwargs, result))
        return result


def _asks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host waits for what an operation gives: for a value, or for its size."""
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # by numbers, or by what is true
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    return func in (torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default)


def _only_views(func: Any, args: tuple[object, ...], result: object) -> bool:
    """Whether all that an operation did is to give memory of an argument another shape: nothing is computed by it."""
    schema = func._schema
    if not isinstance(result, Tensor) or any(argument.is_write for argument in schema.arguments):
        return False
    memory = result.untyped_storage().data_ptr()
    return any(isinstance(given, Tensor) and given.untyped_storage().data_ptr() == memory for given in args)


def _bring(old: Tensor, new: Tensor) -> None:
    """A result to where it was recorded."""
    if old.data_ptr() != new.data_ptr():
        old.copy_(new)


def _spoil(tensor: Tensor) -> None:
    """A recorded result that was not computed."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
