"""The CPU platform's facts about this machine."""

import os

from pagemill.platforms.cpu import CpuPlatform


def test_facts_are_plausible():
    facts = CpuPlatform().facts()
    assert facts.kind == "cpu"
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert facts.free_bytes > 2**20
    assert "float32" in facts.fast_dtypes
