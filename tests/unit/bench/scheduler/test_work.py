import dataclasses

import pytest

from pagemill.bench.scheduler.work import SchedulerWork
from pagemill.errors import ConfigError


def test_long_prompts_are_the_same_every_time_and_share_nothing(work: SchedulerWork):
    first, second = work.prompt(0), work.prompt(1)
    assert first == work.prompt(0) and len(first) == work.admitted_tokens
    assert first[: work.block_size] != second[: work.block_size]
    assert work.num_fillers() * work.admitted_tokens >= work.num_blocks * work.block_size


def test_short_prompts_end_everywhere_in_a_block(work: SchedulerWork):
    prompts = work.short_prompts(0, 32)
    assert {len(prompt) % work.block_size for prompt in prompts} == set(range(work.block_size))
    assert len({tuple(prompt[:16]) for prompt in [*prompts, *work.short_prompts(32, 40)]}) == 40
    assert work.groups() == [(0, 2), (2, 5)]


@pytest.mark.parametrize("name", ["num_steps", "num_repetitions"])
def test_counts_below_one_are_refused(work: SchedulerWork, name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 is too small: at least 1"):
        dataclasses.replace(work, **{name: 0}).check()


def test_more_steps_than_the_pool_has_room_for_are_refused():
    SchedulerWork().check()
    with pytest.raises(ConfigError, match="num_steps=1000 times num_repetitions=5 is too much"):
        SchedulerWork(num_steps=1000).check()
