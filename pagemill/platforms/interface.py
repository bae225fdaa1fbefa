"""`Platform`: the questions that generic code asks about a device."""

from abc import ABC, abstractmethod

from pagemill.config.facts import DeviceFacts


class Platform(ABC):
    """One kind of device. Generic code asks here and never tests for a vendor."""

    name: str

    @abstractmethod
    def facts(self) -> DeviceFacts:
        """Cores, memory and fast types, as of now."""

    @abstractmethod
    def set_threads(self, num_threads: int) -> None:
        """Use this many threads for computing. Called once, before any tensor work."""

    @abstractmethod
    def attention_order(self) -> tuple[str, ...]:
        """Names in catalog.attention, best first."""

    @abstractmethod
    def dist_backend(self) -> str:
        """How tensors travel between ranks: a name in model.distributed.torch_group.BACKENDS."""

    @abstractmethod
    def torch_device(self) -> str:
        """Device string for torch, such as cpu."""
