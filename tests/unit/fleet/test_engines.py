"""What a fleet tells its listeners, and when it is lost. Engines that really run: tests/integration/faults."""

import dataclasses
import threading

import pytest

from pagemill.config.fleet_config import FleetConfig
from pagemill.config.fleet_plan import plan_fleet
from pagemill.errors import EngineDeadError
from pagemill.fleet.engines import EngineFleet, FleetSpec
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
def engines(losses, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    plan = plan_fleet(FleetConfig(data_parallel_size=2))
    spec = FleetSpec(engine_config(), "no:worker", plan)
    with EngineFleet(spec, on_lost=lambda: losses.append(1)) as engines:
        yield engines


def test_a_listener_that_fails_does_not_keep_others_from_the_news(engines):
    heard = []

    def fail(event):
        raise ValueError("a defect of ours")

    engines.subscribe(fail)
    engines.subscribe(heard.append)
    engines._publish(UP[0])
    assert heard == [UP[0]]


def test_a_late_listener_is_told_the_present_state(engines):
    for event in (*UP, EngineDown(1, 0, "boom")):
        engines._publish(event)
    heard = []
    engines.subscribe(heard.append)
    assert heard == [UP[0], EngineDown(1, 0, "boom")]


def test_it_is_lost_when_the_last_engine_is_gone_for_good(engines, losses):
    for event in (*UP, GONE[1], EngineDown(0, 0, "boom"), EngineDown(0, 1, "boom")):
        engines._publish(event)
    assert (engines.lost, losses) == (False, [])
    engines._publish(GONE[0])
    assert (engines.lost, losses) == (True, [1])


def test_waiting_ends_when_an_engine_is_gone_before_all_are_up(engines):
    for supervisor, event in zip(engines._supervisors, UP, strict=True):
        supervisor._first.set_result(event)
    engines._publish(UP[0])
    told = threading.Timer(0.05, engines._publish, [GONE[1]])
    told.start()
    with pytest.raises(EngineDeadError, match="engine core 1 is gone: it failed to start"):
        engines.wait_ready()
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
    spec = FleetSpec(config, "no:worker", plan_fleet(fleet), secret="s")
    with EngineFleet(spec) as engines:
        cores = [engines._core_spec(index, 0) for index in (2, 3)]
    assert [core.config.cpu.cpu_threads_bind for core in cores] == ["0-1", "2-3"]


def test_a_dead_engine_leaves_no_socket_and_those_that_share_its_experts_connect_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    plan = plan_fleet(FleetConfig(data_parallel_size=2), expert_parallel=True)
    with EngineFleet(FleetSpec(engine_config(), "no:worker", plan)) as engines:
        first = [engines._core_spec(index, 0) for index in (0, 1)]
        assert len({core.replicas.address for core in first}) == 1
        engines._publish(EngineDown(0, 0, "boom"))
        (engines.folder.path / "core-0-0").touch()
        engines._supervisors[0]._payload(1)
        assert not (engines.folder.path / "core-0-0").exists()
        assert engines._core_spec(0, 1).replicas.address != first[0].replicas.address
        assert engines._supervisors[1]._to_replace == (0, "engine core 0 is gone, with its experts")
