"""benchmarks/cublas_lt.py, with a library that computes on the host."""

import pytest

from benchmarks.cublas_lt import Config, SearchedLt
from tests.fakes.cublas_library import OFFERED, REFUSED_CLUSTER, TILES, FakeCublas, algo_of


@pytest.fixture
def library() -> SearchedLt:
    return SearchedLt(FakeCublas())


def test_what_an_algorithm_is_set_to(library: SearchedLt):
    assert library.read(algo_of(OFFERED)) == Config(**OFFERED)


def test_neighbours_differ_in_one_thing(library: SearchedLt):
    offered = Config(**OFFERED)
    found = [library.read(algo) for algo in library.neighbours(algo_of(OFFERED))]
    assert offered not in found
    assert len(set(found)) == len(found)
    for config in found:
        changed = {name for name in Config._fields if getattr(config, name) != getattr(offered, name)}
        assert changed == {"split", "reduction"} or len(changed) == 1
    assert {config.tile for config in found} == set(TILES)
    assert {config.custom for config in found} == {0, 1, 2, 3, 4}
    assert {(config.split, config.reduction) for config in found} == {(1, 0), (2, 2), (3, 2), (4, 2)}
    assert REFUSED_CLUSTER not in {config.cluster for config in found}
