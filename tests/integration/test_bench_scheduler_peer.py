"""The comparison with the reference engine's scheduler, where its environment is installed."""

import sys
from pathlib import Path

import pytest

from pagemill.bench.scheduler.measure import measure
from pagemill.bench.scheduler.report import figures
from pagemill.bench.scheduler.work import SchedulerWork

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scheduler_peer import DEFAULT_PEER_PYTHON, PeerProcess

SMALL = SchedulerWork(num_steps=8, num_repetitions=2, decodes=(4, 8), num_cached_blocks=1024, admitted_tokens=1024)


@pytest.mark.slow
@pytest.mark.skipif(not DEFAULT_PEER_PYTHON.expanduser().exists(), reason="benchmarks/setup_peers.sh was not run")
def test_the_peer_does_the_same_work():
    with PeerProcess(DEFAULT_PEER_PYTHON) as peer:
        result = figures(measure(SMALL, peer.call))
    told, peer_told = result["settings"], result["peer"]["settings"]
    same = told.keys() - {"engine", "statistics"}
    assert {name: told[name] for name in same} == {name: peer_told[name] for name in same}
    for name in ("ratio_4", "ratio_8", "ratio_admit_1k", "ratio_admit_1k_new"):
        assert result[name] > 0
