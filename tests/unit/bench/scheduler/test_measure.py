"""The work runs to its end at a small size; what is measured has the right names and plausible values."""

import gc

import pytest

from pagemill.bench.scheduler import measure
from pagemill.bench.scheduler.own import OwnScheduler
from pagemill.bench.scheduler.report import figures
from pagemill.bench.scheduler.work import SchedulerWork
from pagemill.config.choices import HashAlgorithm
from pagemill.errors import ConfigError

STEP_FIGURES = {f"step_{kind}_{size}" for kind in ("ms", "mean_ms", "bytes") for size in (2, 5)}
ADMISSION_FIGURES = {"admit_1k_ms", "admit_1k_new_ms", "admit_1k_bytes", "admit_1k_new_bytes"}
HASH_FIGURES = {f"hash_ns_per_token_{algorithm}" for algorithm in HashAlgorithm}


@pytest.mark.slow
@pytest.mark.usefixtures("freezing")
def test_every_figure_is_there_once_per_repetition(work: SchedulerWork):
    gc.unfreeze()
    measured = measure.measure(work)
    values = measured.own.values
    assert set(values) == STEP_FIGURES | ADMISSION_FIGURES | HASH_FIGURES
    assert {len(values[name]) for name in values if "step_bytes" not in name} == {2}
    assert all(value > 0 for each in values.values() for value in each)
    assert measured.num_cached_blocks >= work.num_cached_blocks
    assert measured.peer is None
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_sides_take_turns_at_the_same_work(work: SchedulerWork, own_as_peer, monkeypatch: pytest.MonkeyPatch):
    turns = []
    steps = OwnScheduler.steps
    monkeypatch.setattr(OwnScheduler, "steps", lambda self, count: turns.append((self, count)) or steps(self, count))
    measured = measure.measure(work, own_as_peer)
    assert set(measured.peer.values) == set(measured.own.values)
    assert [count for _, count in turns] == [2, 2, 6, 6, 6, 6] * 2
    assert all(left is not right for (left, _), (right, _) in zip(turns[::2], turns[1::2], strict=True))
    result = figures(measured)
    assert result["peer"]["step_bytes_5"] == result["step_bytes_5"]
    assert result["ratio_2"] > 0


@pytest.mark.slow
def test_a_side_that_does_not_find_its_prefix_is_no_measurement(work: SchedulerWork, own_as_peer):
    def forgetful(method, *args):
        result = own_as_peer(method, *args)
        return result | {"cached_tokens": 0} if method == "admit" else result

    with pytest.raises(RuntimeError, match="found 0 tokens, not 1008"):
        measure.measure(work, forgetful)


@pytest.mark.slow
def test_an_algorithm_that_a_side_lacks_is_left_out(work: SchedulerWork, own_as_peer):
    def poor(method, *args):
        if method == "hash_seconds" and args[0].startswith("xxhash"):
            raise ConfigError("no such package")
        return own_as_peer(method, *args)

    measured = measure.measure(work, poor)
    assert set(measured.own.values) - set(measured.peer.values) == {
        "hash_ns_per_token_xxhash",
        "hash_ns_per_token_xxhash_cbor",
    }


def test_the_message_of_a_steady_step_is_two_arrays(work: SchedulerWork):
    """16 decodes that do not grow: 8 bytes each, and the names of the fields."""
    scheduler = OwnScheduler(work.settings() | {"max_num_seqs": 16}, 7, [1, 2])
    scheduler.start([[index, 11, 12, 13] for index in range(20, 36)], 100)
    assert 16 * 8 < scheduler.step_bytes(4) < 16 * 8 + 80
