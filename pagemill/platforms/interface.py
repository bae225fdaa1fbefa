"""`Platform`: the questions that generic code asks about a device. Knows no model and no request."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from pagemill.config.facts import DeviceFacts

if TYPE_CHECKING:
    from torch import Tensor  # deferred: facts must not cost the import of torch


class Platform(ABC):
    """One kind of device. Generic code asks here and never tests for a vendor."""

    name: ClassVar[str]
    runs_ahead: ClassVar[bool] = False
    """Whether work is queued: a call returns before the device is done with it."""

    def absence(self) -> str | None:
        """Why there is no such device here; None: there is one. Costs no import of torch."""
        return None

    @abstractmethod
    def facts(self) -> DeviceFacts:
        """Cores, memory and fast types, as of now."""

    def prepare(self, local_rank: int) -> None:  # noqa: B027 - most devices need none
        """Begin what `start` with the same number will wait for, as far as it needs no torch, which is not imported
        yet. Called in the process that will use the device, and that is not forked any more. Raises nothing."""

    def start(self, local_rank: int) -> None:  # noqa: B027 - most devices need none
        """Take device number `local_rank` for this process. Called once, before any tensor work. Raises ConfigError
        when it is not there."""

    @abstractmethod
    def set_threads(self, num_threads: int, cpus: tuple[int, ...] = ()) -> None:
        """Use this many threads for computing, on these CPUs where there are any. Called before any tensor work, on
        the thread that will do it or start who does."""

    def release_threads(self) -> None:  # noqa: B027 - most devices bind none
        """Let threads use the CPUs again that they had before `set_threads`."""

    @abstractmethod
    def attention_order(self) -> tuple[str, ...]:
        """Names in catalog.attention, best first."""

    @abstractmethod
    def dist_backend(self) -> str:
        """How tensors travel between ranks: a name in model.distributed.torch_group.BACKENDS."""

    @abstractmethod
    def torch_device(self) -> str:
        """Device string for torch, such as cpu."""

    def memory(self) -> "DeviceMemory | None":
        """The device's own memory; None: it computes in the host's."""
        return None

    def transfers(self) -> "Transfers":
        """A way between host and device, for one runner."""
        from pagemill.platforms.direct import DirectTransfers  # deferred: torch

        return DirectTransfers()

    def copier(self) -> "Copier | None":
        """Copies to the device that several threads enqueue, in order with what the calling thread does; None: weights
        get there by torch's own copies."""
        return None

    def graph_maker(self) -> "GraphMaker | None":
        """Captures what is queued, for one runner; None: the device has no such thing."""
        return None


class Mark(Protocol):
    """A place in the device's queue of work."""

    def reached(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Return when it is."""


class Transfers(ABC):
    """Copies between host and device that hold up neither. Called by one thread.

    Work is queued in order; `upload` and `download` keep that order without waiting for it.
    """

    @abstractmethod
    def host_buffer(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """Host memory that the device can read while the host goes on. `dtype`: name of a torch dtype."""

    @abstractmethod
    def upload(self, target: "Tensor", source: "Tensor") -> None:
        """Copy `source`, made by `host_buffer`, for the work that is queued from now on. `target` must not be in use by
        work that is queued already, and `source` stay as it is until a mark set later is reached."""

    @abstractmethod
    def download(self, target: "Tensor", source: "Tensor") -> Mark:
        """Copy `source` as all work queued until now leaves it; `target` holds it when the mark is reached. Work that
        is queued later must not write `source` before."""

    @abstractmethod
    def mark(self) -> Mark:
        """Reached when all work is done that is queued until now."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all queued work is done."""


@dataclass(frozen=True, slots=True)
class CopierCalls:
    """Addresses of functions of C that any thread may call, and of what they are called with. They take what those of
    the CUDA driver do, and return 0."""

    set_context: int
    """cuCtxSetCurrent: called first by a thread."""
    make_stream: int
    end_stream: int
    make_event: int
    end_event: int
    record: int
    """cuEventRecord."""
    hold: int
    """cuStreamWaitEvent."""
    finish: int
    """cuEventSynchronize."""
    copy: int
    """cuMemcpyHtoDAsync."""
    pin: int
    """cuMemHostRegister; where it fails, copies are from memory that is not pinned."""
    unpin: int
    context: int
    main_stream: int
    """What the device does with tensors is enqueued there."""
    keeps: int = 0
    """1: what has been pinned in the context may stay so, and be used by whoever loads next in the process."""


class Copier(ABC):
    """Copies from host memory to a device, enqueued by any thread, on streams that it makes for itself."""

    calls: CopierCalls

    @abstractmethod
    def free_bytes(self) -> int:
        """Free memory of the device."""

    @abstractmethod
    def describe(self, status: int) -> str:
        """What a function means that has not returned 0."""


class DeviceMemory(Protocol):
    """A device's own memory, in bytes. Sizes of one process are what torch holds for it."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """Of the device, whoever asks."""

    def others(self) -> int:
        """In use before this process took any: other processes' memory."""

    def allocated(self) -> int:
        """In tensors of this process."""

    def reserved(self) -> int:
        """Held by this process for tensors, in use or not."""

    def peak(self) -> int:
        """Most that was held for tensors since `restart_peak`."""

    def restart_peak(self) -> None:
        """Forget the peak, and give back what is reserved but not in use."""


class Graph(Protocol):
    """Device work that is recorded once and replayed any number of times, on the same addresses."""

    def begin(self) -> None:
        """Record from here on; nothing that is launched runs."""

    def end(self) -> None:
        """The recording is complete."""

    def abort(self) -> None:
        """Give up a recording in which an error was raised."""

    def replay(self) -> None:
        """Run what was recorded."""


class GraphMaker(Protocol):
    """Makes graphs that share one memory pool: they are replayed in any order, never two at once."""

    def graph(self) -> Graph:
        """An empty graph."""

    def borrow(self, tensor: "Tensor") -> "Tensor":
        """The same memory without owning it, so that graphs captured later may use it too: a graph's result is good
        until the next graph is replayed."""
