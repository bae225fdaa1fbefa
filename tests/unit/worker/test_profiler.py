"""Traces of one worker."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.worker.profiler import WorkerProfiler


@pytest.mark.slow
def test_what_is_computed_is_in_the_trace(tmp_path: Path) -> None:
    profiler = WorkerProfiler(3)
    profiler.start(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="a profile is being recorded already"):
        profiler.start(str(tmp_path / "other"))
    torch.ones(4, 4).matmul(torch.ones(4, 4))
    path = profiler.stop()
    assert path == str(tmp_path / "run-rank3.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]}
    assert "aten::matmul" in names


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    profiler = WorkerProfiler(0)
    with pytest.raises(ConfigError, match="no profile is being recorded; start one first"):
        profiler.stop()
    with pytest.raises(ConfigError, match="there is no folder"):
        profiler.start(str(tmp_path / "none" / "run"))
