from pathlib import Path

import pytest
import torch

from pagemill.bench.profiling import gpu_trace
from pagemill.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_nothing_to_record(tmp_path: Path):
    with pytest.raises(ConfigError, match="no GPU here"), gpu_trace(tmp_path / "trace.json"):
        pass


def test_the_file_must_be_named_as_what_it_becomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"must end in \.json"), gpu_trace(tmp_path / "trace.txt"):
        pass
