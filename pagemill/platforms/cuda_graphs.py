"""CUDA graphs in one memory pool: `CudaGraphMaker` makes them, `CudaGraph` records and replays. Knows no model."""

import gc
from typing import Any

import torch
from torch import Tensor


class CudaGraphMaker:
    """Makes graphs that share a memory pool and are recorded on a stream of their own."""

    def __init__(self) -> None:
        """On the current device."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def graph(self) -> "CudaGraph":
        """An empty graph, in the pool that all share."""
        return CudaGraph(self)

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it; a tensor of another device as it is."""
        if not tensor.is_cuda or not tensor.numel():
            return tensor
        # Elements are copied as bytes, for the array interface has no name for bfloat16 or float8.
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.element_size()
        raw = torch.as_tensor(_Memory(tensor.data_ptr(), num_bytes), device=tensor.device)
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CudaGraph:
    """One CUDA graph."""

    def __init__(self, maker: CudaGraphMaker) -> None:
        self._maker = maker
        self._graph = torch.cuda.CUDAGraph()
        self._on_stream: Any = None
        self._collects = False

    def begin(self) -> None:
        """Record what this thread launches on the recording stream, which is the current one until `end`."""
        torch.cuda.synchronize()
        # A collection may destroy another graph, which CUDA does not allow while one is recorded.
        self._collects = gc.isenabled()
        gc.disable()
        self._on_stream = torch.cuda.stream(self._maker.stream)
        self._on_stream.__enter__()
        self._graph.capture_begin(pool=self._maker.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """The recording is complete; the stream from before is the current one again."""
        try:
            self._graph.capture_end()
        finally:
            self._leave()

    def abort(self) -> None:
        """Give up. The error that led here is the one to be seen, so CUDA's about an invalid recording is not."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._forget()
        finally:
            self._leave()

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()

    def _forget(self) -> None:
        """An invalid recording ends before torch has told its allocator and its generator that it is over: later graphs
        get another pool, and the generator another state."""
        self._maker.pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())

    def _leave(self) -> None:
        self._on_stream.__exit__(None, None, None)
        if self._collects:
            gc.enable()


class _Memory:
    """Device memory as bytes, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
