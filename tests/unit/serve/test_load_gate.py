"""The limits of a deployment, as its front ends see them."""

import contextlib
from collections.abc import Callable

import pytest

from pagemill.errors import EngineOverloadedError, RequestError, UnavailableError
from pagemill.observability.serving_metrics import QUEUE_FULL, QUEUED_TOKENS, ServingMetrics
from pagemill.serve.load_gate import LoadGate, LoadLimits, LoadRow
from pagemill.serve.processing.output_processor import OutputProcessor
from pagemill.transport.shm_load import Load, SharedLoad, create_load
from tests.fakes.configs import scheduler_config


def make_gate(limits: LoadLimits, row: LoadRow | None = None) -> tuple[LoadGate, ServingMetrics]:
    metrics = ServingMetrics("m", 100, {}, dict)
    gate = LoadGate(limits, OutputProcessor(lambda token: False), metrics)
    if row is not None:
        gate.share(row)
    return gate, metrics


def test_limits_count_the_slots_of_every_engine() -> None:
    scheduler = scheduler_config(max_num_seqs=4, max_num_queued_reqs=1, max_num_queued_tokens=7)
    assert LoadLimits.of(scheduler, 2) == LoadLimits(9, 7)
    assert LoadLimits.of(scheduler_config(max_num_queued_reqs=0), 1) == LoadLimits(None, None)


def test_room_is_taken_while_a_request_comes_in_and_given_back() -> None:
    gate, metrics = make_gate(LoadLimits(num_requests=3))
    with gate.reserve(Load(2, 10), limited=True) as reservation:
        gate.check()
        with pytest.raises(EngineOverloadedError, match=r"2 requests run and wait already.*2 more.*limit is 3"):
            gate.check(Load(2, 0))
        reservation.use(1, 5)
        assert reservation.load == (1, 5)
        gate.check(Load(1, 0))
        with gate.reserve(Load(50, 10), limited=False), pytest.raises(EngineOverloadedError):
            gate.check()
    gate.check(Load(3, 0))
    assert metrics.num_rejected == {QUEUE_FULL: 2, QUEUED_TOKENS: 0}


def test_what_never_fits_is_the_fault_of_the_request() -> None:
    gate, metrics = make_gate(LoadLimits(num_requests=3))
    with pytest.raises(RequestError, match=r"4 completions \(prompts x n\)") as refused:
        gate.check(Load(4, 0))
    assert refused.value.field == "n"
    assert sum(metrics.num_rejected.values()) == 0


def test_tokens_that_wait_are_limited_but_one_request_may_always_wait() -> None:
    gate, metrics = make_gate(LoadLimits(num_queued_tokens=100))
    with gate.reserve(Load(1, 500), limited=True) as reservation:
        with pytest.raises(EngineOverloadedError, match="500 prompt tokens wait already"):
            gate.check(Load(1, 1))
        reservation.use(1, 450)
        with gate.reserve(Load(0, 0), limited=False):
            pass
        gate.check(Load(1, 50))
        with pytest.raises(EngineOverloadedError):
            gate.check(Load(1, 51))
    assert metrics.num_rejected == {QUEUE_FULL: 0, QUEUED_TOKENS: 2}


def test_front_ends_see_what_the_others_have() -> None:
    shared = SharedLoad(create_load(2))
    (one, _), (two, _) = (make_gate(LoadLimits(num_requests=3), LoadRow(shared, row)) for row in range(2))
    with one.reserve(Load(2, 10), limited=True):
        assert shared.total() == (2, 10)
        with two.reserve(Load(1, 1), limited=True), pytest.raises(EngineOverloadedError):
            one.check()
        two.check()
    assert shared.total() == (0, 0)
    shared.close()


class Hasty(LoadRow):
    """A front end that has no lock, and another that asks for room at the moment when this one has written itself
    down."""

    def __init__(self, shared: SharedLoad, row: int, then: Callable[[], object]) -> None:
        super().__init__(shared, row)
        self.lock = contextlib.nullcontext
        self.then: Callable[[], object] | None = then

    def set(self, load: Load) -> None:
        super().set(load)
        if load.num_requests and self.then is not None:
            then, self.then = self.then, None
            then()


def test_without_the_lock_there_is_never_too_much_either() -> None:
    shared = SharedLoad(create_load(2))
    two, _ = make_gate(LoadLimits(num_requests=3), LoadRow(shared, 1))
    refused = []

    def ask() -> None:
        with (
            pytest.raises(EngineOverloadedError, match="2 requests run and wait already"),
            two.reserve(Load(2, 0), True),
        ):
            pass
        refused.append(shared.total())

    one, _ = make_gate(LoadLimits(num_requests=3), Hasty(shared, 0, ask))
    with one.reserve(Load(2, 0), limited=True):
        assert refused == [(2, 0)], "the other one saw it, and has withdrawn what it asked for"
    assert shared.total() == (0, 0)
    shared.close()


def test_a_draining_server_takes_nothing() -> None:
    gate, _ = make_gate(LoadLimits())
    gate.check()
    gate.drain()
    assert gate.draining
    with pytest.raises(UnavailableError):
        gate.check()
