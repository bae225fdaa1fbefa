"""What a deployment tells its listeners, and when it is lost. Engines that really run: tests/integration/faults."""

import dataclasses
import threading

import msgspec
import pytest

from pagemill.config.fleet_plan import plan_fleet
from pagemill.config.sections import FleetConfig
from pagemill.engine.process import CoreSpec
from pagemill.errors import EngineDeadError
from pagemill.fleet.engines import EngineFleet
from pagemill.fleet.supervisor import LivenessTimeouts
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineUp
from tests.fakes.engine_setup import engine_config

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)
UP = [EngineUp(index, 0, f"address-{index}", READY) for index in (0, 1)]
GONE = [EngineDown(index, 3, "it failed to start", final=True) for index in (0, 1)]


@pytest.fixture
def losses():
    return []


@pytest.fixture
def deployment(losses, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    plan = plan_fleet(FleetConfig(data_parallel_size=2))
    with EngineFleet(
        engine_config(), "no:worker", plan, LivenessTimeouts(), on_lost=lambda: losses.append(1)
    ) as deployment:
        yield deployment


def test_a_listener_that_fails_does_not_keep_others_from_the_news(deployment):
    heard = []

    def fail(event):
        raise ValueError("a defect of ours")

    deployment.subscribe(fail)
    deployment.subscribe(heard.append)
    deployment._publish(UP[0])
    assert heard == [UP[0]]


def test_a_late_listener_is_told_the_present_state(deployment):
    for event in (*UP, EngineDown(1, 0, "boom")):
        deployment._publish(event)
    heard = []
    deployment.subscribe(heard.append)
    assert heard == [UP[0], EngineDown(1, 0, "boom")]


def test_it_is_lost_when_the_last_engine_is_gone_for_good(deployment, losses):
    for event in (*UP, GONE[1], EngineDown(0, 0, "boom"), EngineDown(0, 1, "boom")):
        deployment._publish(event)
    assert (deployment.lost, losses) == (False, [])
    deployment._publish(GONE[0])
    assert (deployment.lost, losses) == (True, [1])


def test_waiting_ends_when_an_engine_is_gone_before_all_are_up(deployment):
    for supervisor, event in zip(deployment._supervisors, UP, strict=True):
        supervisor._first.set_result(event)
    deployment._publish(UP[0])
    told = threading.Timer(0.05, deployment._publish, [GONE[1]])
    told.start()
    with pytest.raises(EngineDeadError, match="engine core 1 is gone: it failed to start"):
        deployment.wait_ready()
    told.join()


def test_an_engine_is_told_of_its_own_cpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    config = engine_config()
    config = dataclasses.replace(config, cpu=dataclasses.replace(config.cpu, cpu_threads_bind="0-1|2-3"))
    fleet = FleetConfig(
        data_parallel_size=4,
        headless=True,
        data_parallel_start_rank=2,
        data_parallel_size_local=2,
        data_parallel_address="127.0.0.1",
    )
    with EngineFleet(config, "no:worker", plan_fleet(fleet), LivenessTimeouts(), secret="s") as deployment:
        births = [msgspec.msgpack.decode(deployment._payload_of(index)(0), type=CoreSpec) for index in (2, 3)]
    assert [birth.config.cpu.cpu_threads_bind for birth in births] == ["0-1", "2-3"]
