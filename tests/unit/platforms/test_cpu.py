"""The CPU platform's facts about this machine."""

import logging
import os

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.platforms.cpu import CpuPlatform
from pagemill.platforms.interface import Platform
from pagemill.platforms.thread_plan import ThreadWish


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


def test_only_a_cpu_is_bound():
    class OtherPlatform(CpuPlatform):
        name = "other"
        plan_threads = Platform.plan_threads

    plan = OtherPlatform().plan_threads(ThreadWish("auto", 3, 2, front_end=True))
    assert (plan.threads, plan.cpus) == (3, ())
    with pytest.raises(
        ConfigError, match="cpu_threads_bind='0-1' binds what computes on a CPU, and the device is other"
    ):
        OtherPlatform().plan_threads(ThreadWish("0-1", None, 1, front_end=True))
