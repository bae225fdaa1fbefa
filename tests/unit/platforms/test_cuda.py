"""What the CUDA platform says of a machine, from what the driver's management library says."""

from types import SimpleNamespace

import pytest

from pagemill.platforms import cuda


@pytest.mark.parametrize(("total_gib", "num_seqs"), [(24, 256), (69, 256), (80, 1024), (141, 1024)])
def test_large_gpus_run_more_requests_at_once(monkeypatch, total_gib, num_seqs):
    used = 2 << 30
    device = SimpleNamespace(
        capability=(9, 0), free_bytes=(total_gib << 30) - used, used_bytes=used, title="GPU", memory_bytes_per_s=1e12
    )
    monkeypatch.setattr(cuda, "_Management", lambda: SimpleNamespace(device=lambda index: device))
    facts = cuda.CudaPlatform().facts()
    assert (facts.num_seqs, facts.token_budget) == (num_seqs, 8192)
