"""The CPU platform's facts about this machine."""

import logging
import os

import torch

from pagemill.platforms.cpu import CpuPlatform


def test_facts_are_plausible():
    facts = CpuPlatform().facts()
    assert facts.kind == "cpu"
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert facts.free_bytes > 2**20
    assert "float32" in facts.fast_dtypes


def test_threads_are_said_and_bound_and_released(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pagemill"), "propagate", True)
    before, threads, platform = os.sched_getaffinity(0), torch.get_num_threads(), CpuPlatform()
    cpu = min(before)
    try:
        with caplog.at_level("INFO"):
            platform.set_threads(4, (cpu,))
        assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (1, {cpu})
        assert f"computes with 1 thread bound to CPU {cpu}, NUMA node" in caplog.text
        platform.release_threads()
        assert os.sched_getaffinity(0) == before
        with caplog.at_level("INFO"):
            platform.set_threads(2)
        assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (2, before)
        assert "computes with 2 threads on any of CPUs" in caplog.text or len(before) == 1
    finally:
        platform.release_threads()
        torch.set_num_threads(threads)
