"""How long blocks stay, by a clock of our own."""

import random

import pytest

from pagemill.engine.kv_cache.block_pool import BlockPool
from pagemill.engine.kv_cache.residency import MAX_SAMPLES, ResidencySampler


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def pool_of(num_blocks, clock, share=1.0, seed=0):
    sampler = ResidencySampler(share, clock, random.Random(seed))
    return BlockPool(num_blocks, [sampler]), sampler


def test_lifetime_idle_time_and_reuse_gap_of_a_block(clock):
    pool, sampler = pool_of(2, clock)
    (block,) = pool.allocate(1)
    pool.commit(block, b"key")
    clock.now += 5
    pool.free([block])
    clock.now += 2
    pool.touch([block])
    clock.now += 1
    pool.free([block])
    clock.now += 4
    assert sampler.take().reuse_gaps_s == [2.0]
    pool.allocate(1)
    samples = sampler.take()
    assert (samples.lifetimes_s, samples.idle_s, samples.reuse_gaps_s) == ([12.0], [4.0], [])
    assert sampler.take() is None


def test_a_share_of_the_blocks_is_followed(clock):
    pool, sampler = pool_of(2001, clock, share=0.05)
    for _ in range(5):
        pool.free(pool.allocate(2000))
        clock.now += 1
    samples = sampler.take()
    assert 300 < len(samples.lifetimes_s) < 500  # of 8,000 that were taken again
    assert set(samples.lifetimes_s) == {1.0}


def test_one_block_at_a_time_is_followed_as_often(clock):
    pool, sampler = pool_of(2, clock, share=0.05)
    for _ in range(4000):
        pool.free(pool.allocate(1))
    assert 150 < len(sampler.take().lifetimes_s) < 250


def test_what_nobody_takes_away_does_not_pile_up(clock):
    pool, sampler = pool_of(2, clock)
    for _ in range(3 * MAX_SAMPLES):
        pool.free(pool.allocate(1))
    assert len(sampler.take().lifetimes_s) == MAX_SAMPLES


def test_emptying_the_cache_evicts_everything(clock):
    pool, sampler = pool_of(3, clock)
    pool.free(pool.allocate(2))
    clock.now += 3
    pool.forget_all()
    samples = sampler.take()
    assert (samples.lifetimes_s, samples.idle_s) == ([3.0, 3.0], [3.0, 3.0])
    clock.now += 3
    pool.allocate(2)
    assert sampler.take() is None, "they were evicted once"
