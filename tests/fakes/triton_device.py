"""A device for Triton's compiler that loads and launches nothing, but counts."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget


@dataclasses.dataclass
class Device:
    """What Triton asks of a driver."""

    launches: list[tuple[str, tuple[int, int, int]]]
    loads: list[str]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda x, y, z, *rest: self.launches.append((metadata.name, (x, y, z)))

    @property
    def utils(self) -> SimpleNamespace:
        def load(name: str, *_: object) -> tuple[int, ...]:
            self.loads.append(name)
            return (1, 1, 0, 0, 1024)

        return SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=load)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """A device on which nothing was compiled yet."""
    driver = importlib.import_module("triton.runtime.driver").driver
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = Device([], [])
    monkeypatch.setattr(driver, "_active", found)
    return found
