"""Memory of packed weights."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from pagemill.model.kernels.weight_memory import ALIGNMENT_BYTES, CHUNK_BYTES, HUGE_PAGE_BYTES, WeightMemory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes():
    """Bytes of all mappings that ask for huge pages. Linux may show neighbours as one: their number says less."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags") and " hg" in line:
            total += size
    return total


def test_tensors_lie_side_by_side_and_do_not_overlap():
    memory = WeightMemory()
    first = memory.empty(3, 7, dtype=torch.uint8).fill_(1)
    second = memory.empty(5, dtype=torch.bfloat16).fill_(2)
    assert (first.shape, second.shape, second.dtype) == ((3, 7), (5,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT_BYTES
    assert first.is_contiguous() and bool((first == 1).all()) and bool((second == 2).all())
    if sys.platform == "linux":
        assert first.data_ptr() % HUGE_PAGE_BYTES == 0


def test_what_does_not_fit_gets_a_mapping_of_its_own():
    memory = WeightMemory()
    small = memory.empty(8, dtype=torch.float32).fill_(3)
    large = memory.empty(CHUNK_BYTES + 4, dtype=torch.uint8)
    large[-1] = 5
    after = memory.empty(8, dtype=torch.float32).fill_(4)
    assert (len(large), large[-1], small.sum(), after.sum()) == (CHUNK_BYTES + 4, 5, 24, 32)


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_mappings_ask_for_huge_pages_and_go_with_their_last_tensor():
    gc.collect()
    before = huge_bytes()
    memory = WeightMemory()
    kept = memory.empty(100, dtype=torch.uint8)
    assert huge_bytes() == before + CHUNK_BYTES + HUGE_PAGE_BYTES
    del memory
    assert huge_bytes() == before + CHUNK_BYTES + HUGE_PAGE_BYTES
    del kept
    assert huge_bytes() == before
