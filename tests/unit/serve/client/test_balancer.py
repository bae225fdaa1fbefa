"""Which engine gets a request."""

import random

import pytest

from pagemill.serve.client.balancer import (
    BALANCERS,
    CHUNK_TOKENS,
    EngineLoad,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
)
from tests.fakes.engine_setup import core_request

IDLE = {0: EngineLoad(), 1: EngineLoad()}


def test_round_robin_takes_turns_over_those_that_are_up():
    balancer = RoundRobin()
    assert [balancer.choose(core_request("r", 3), IDLE) for _ in range(4)] == [0, 1, 0, 1]
    assert balancer.choose(core_request("r", 3), {1: EngineLoad()}) == 1


def test_the_shortest_queue_wins_and_waiting_weighs_more():
    balancer = LeastLoaded()
    assert balancer.choose(core_request("r", 3), {0: EngineLoad(5, 0), 1: EngineLoad(2, 1)}) == 0
    assert balancer.choose(core_request("r", 3), {0: EngineLoad(7, 0), 1: EngineLoad(2, 1)}) == 1
    assert balancer.choose(core_request("r", 3), IDLE) == 0


def test_a_prompt_goes_where_its_prefix_went():
    balancer = PrefixAffinity()
    shared = list(range(CHUNK_TOKENS))
    assert balancer.choose(core_request("a", [*shared, 1]), {0: EngineLoad(1), 1: EngineLoad()}) == 1
    assert balancer.choose(core_request("b", [*shared, 2, 3]), IDLE) == 1
    assert balancer.choose(core_request("other", [9, *shared]), IDLE) == 0
    assert balancer.choose(core_request("salted", [*shared, 2], salt="s"), IDLE) == 0


def test_not_if_that_engine_is_much_busier():
    balancer = PrefixAffinity()
    prompt = list(range(CHUNK_TOKENS))
    assert balancer.choose(core_request("a", prompt), IDLE) == 0
    assert balancer.choose(core_request("b", prompt), {0: EngineLoad(8), 1: EngineLoad(0)}) == 0
    assert balancer.choose(core_request("c", prompt), {0: EngineLoad(9), 1: EngineLoad(0)}) == 1
    assert balancer.choose(core_request("d", prompt), IDLE) == 1, "it is there now"


def test_a_lost_cache_is_forgotten_and_a_dead_engine_never_chosen():
    balancer = PrefixAffinity()
    prompt = list(range(CHUNK_TOKENS))
    assert balancer.choose(core_request("a", prompt), {1: EngineLoad()}) == 1
    assert balancer.choose(core_request("b", prompt), {0: EngineLoad()}) == 0
    balancer.choose(core_request("c", prompt), {1: EngineLoad()})
    balancer.forget(1)
    assert balancer.choose(core_request("d", prompt), IDLE) == 0


def hit_rate(balancer, num_engines=4):
    """Share of prompt chunks found on the chosen engine: 200 conversations in random order, ten system prompts."""
    rng = random.Random(0)
    systems = [[rng.randrange(1000) for _ in range(4 * CHUNK_TOKENS)] for _ in range(10)]
    caches = [set() for _ in range(num_engines)]
    hits = total = 0
    for index in range(200):
        prompt = rng.choice(systems) + [rng.randrange(1000) for _ in range(CHUNK_TOKENS)]
        loads = {engine: EngineLoad(rng.randrange(4)) for engine in range(num_engines)}
        engine = balancer.choose(core_request(str(index), prompt), loads)
        for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
            key = tuple(prompt[:end])
            hits += key in caches[engine]
            total += 1
            caches[engine].add(key)
    return hits / total


def test_affinity_finds_more_in_the_caches_than_taking_turns():
    assert hit_rate(PrefixAffinity()) > 0.75 > 0.68 > hit_rate(RoundRobin())


@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_has_a_name_and_chooses_among_what_is_up(name):
    balancer = BALANCERS[name]()
    for index in range(10):
        assert balancer.choose(core_request(str(index), 100), {3: EngineLoad(), 5: EngineLoad()}) in (3, 5)
    balancer.forget(3)
