"""`WorkerProfiler`: records what one worker computes, from one call to another, with torch.profiler."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pagemill.errors import ConfigError


class WorkerProfiler:
    """One recording at a time, of this process: both calls come on the thread that runs the steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._recording: Any = None
        self._path = Path()

    def start(self, prefix: str) -> None:
        """Record from now on. Raises ConfigError when that is done already, or the folder of `prefix` is not there."""
        if self._recording is not None:
            raise ConfigError(f"a profile is being recorded already, for {self._path}")
        path = Path(f"{prefix}-rank{self._rank}.json.gz").absolute()
        if not path.parent.is_dir():
            raise ConfigError(f"the profile {path} cannot be written: there is no folder {path.parent}")
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        recording = profile(activities=kinds)
        recording.start()
        self._recording = recording
        self._path = path

    def stop(self) -> str:
        """Write what was recorded; the file's name. Raises ConfigError when nothing is recorded, or the file cannot be
        written."""
        recording = self._recording
        if recording is None:
            raise ConfigError("no profile is being recorded; start one first")
        self._recording = None
        recording.stop()
        try:
            recording.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot write {self._path}: {error}") from None
        return str(self._path)
