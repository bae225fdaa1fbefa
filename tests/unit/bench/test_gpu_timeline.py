import gzip
import json
from pathlib import Path

import pytest

from pagemill.bench.gpu_timeline import Span, gpu_table, read_trace, summarize_gpu
from pagemill.errors import ConfigError


def test_busy_share_counts_overlap_once_and_gaps_by_length():
    spans = [Span("a", 0, 10), Span("b", 5, 10), Span("a", 16, 4), Span("c", 60, 40)]
    timeline = summarize_gpu(spans)
    assert timeline is not None
    assert timeline.duration_ms == pytest.approx(0.1)
    assert timeline.busy_share == pytest.approx((15 + 4 + 40) / 100)
    assert timeline.num_gaps == 1 and timeline.gaps_ms == pytest.approx(0.04)
    assert timeline.longest_gap_ms == pytest.approx(0.04)
    assert [(kernel.name, kernel.count, kernel.total_ms) for kernel in timeline.kernels] == [
        ("c", 1, pytest.approx(0.04)),
        ("a", 2, pytest.approx(0.014)),
        ("b", 1, pytest.approx(0.01)),
    ]
    assert "GPU busy 59.0%" in gpu_table(timeline)


def test_a_span_inside_another_adds_nothing():
    timeline = summarize_gpu([Span("long", 0, 100), Span("short", 10, 5), Span("next", 100, 10)])
    assert timeline is not None and timeline.busy_share == pytest.approx(1.0) and timeline.num_gaps == 0


def test_only_the_window_counts():
    spans = [Span("prompt", 0, 40), *(Span("decode", 40 + 10 * index, 9) for index in range(6))]
    timeline = summarize_gpu(spans, window=(0.4, 1.0))
    assert timeline is not None
    assert [kernel.name for kernel in timeline.kernels] == ["decode"]


def test_nothing_there():
    assert summarize_gpu([]) is None
    assert summarize_gpu([Span("a", 0, 100)], window=(0.5, 0.6)) is None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_reads_what_the_gpu_did_from_a_trace(tmp_path: Path, name: str):
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20.5, "dur": 3.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10.0, "dur": 1.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 5.0},
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    raw = json.dumps({"traceEvents": events}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert read_trace(path) == [Span("Memcpy HtoD", 10.0, 1.0), Span("gemm", 20.5, 3.0)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"}]}'])
def test_a_file_that_is_no_trace(tmp_path: Path, content: str):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"trace\.json is no Chrome trace"):
        read_trace(path)
