"""Which Ray cluster an engine gets, and room on it."""

import signal
import subprocess
import sys

import pytest

from pagemill.engine.executor.placement import bundle_plans
from pagemill.engine.executor.ray_cluster import PRIVATE, RayCluster
from pagemill.errors import ConfigError
from tests.fakes.ray_module import FakeRay

TWO_NODES = {"10.0.0.1": {"CPU": 2.0}, "10.0.0.2": {"CPU": 2.0}}


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def addresses(ray):
    return [address for address, _ in ray.inits]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray.*pip install 'pagemill\[ray\]'"):
        RayCluster(1)


@pytest.mark.slow
def test_the_package_is_not_imported_before_it_is_used():
    code = "import sys, pagemill.engine.executor.factory, pagemill.worker.ray_actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_a_cluster_on_this_machine_is_used(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    cluster = RayCluster(1)
    assert addresses(ray) == ["auto"]
    assert cluster.nodes() == TWO_NODES
    cluster.close()
    assert not ray.connected


def test_an_address_in_the_environment_comes_first(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ray = FakeRay(TWO_NODES, running=False).install(monkeypatch)
    RayCluster(1).close()
    assert addresses(ray) == ["10.0.0.1:6379"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("10.0.0.7:1", "RAY_ADDRESS='10.0.0.7:1': no Ray cluster can be reached there: nobody is at 10.0.0.7:1"),
        ("ray://10.0.0.1:10001", "RAY_ADDRESS='ray://10.0.0.1:10001' is that of a Ray client server.*give HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_used(monkeypatch, address, says):
    monkeypatch.setenv("RAY_ADDRESS", address)
    FakeRay(TWO_NODES).install(monkeypatch)
    with pytest.raises(ConfigError, match=says):
        RayCluster(1)


@pytest.mark.parametrize("address", [None, "local"])
def test_without_a_cluster_one_is_started_with_room(monkeypatch, address):
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    ray = FakeRay(TWO_NODES, running=False).install(monkeypatch)
    RayCluster(500).close()
    address, options = ray.inits[-1]
    assert address == "local"
    assert options["num_cpus"] == 500
    assert options["include_dashboard"] is False


def test_the_cluster_of_another_engine_is_left_alone(monkeypatch):
    ray = FakeRay(TWO_NODES, marks=[PRIVATE]).install(monkeypatch)
    RayCluster(1).close()
    assert addresses(ray) == ["auto", "local"]


def test_the_last_user_closes_the_connection(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    first, second = RayCluster(1), RayCluster(1)
    assert len(ray.inits) == 1
    first.close()
    first.close()
    assert ray.connected
    second.close()
    assert not ray.connected


def test_a_connection_that_was_there_before_stays(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    ray.init("auto")
    RayCluster(1).close()
    assert ray.connected
    assert len(ray.inits) == 1


def test_how_the_process_ends_is_not_up_to_ray(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    connect = ray.init

    def init(address=None, **options):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        connect(address, **options)

    ray.init = init
    RayCluster(1).close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("cpus", "tp", "pp", "bundles", "nodes"),
    [
        ((2.0, 2.0), 2, 2, 2, ["10.0.0.2", "10.0.0.1"]),  # a stage each
        ((4.0, 0.0), 2, 2, 2, ["10.0.0.1", "10.0.0.1"]),
        ((1.0, 1.0), 2, 1, 2, ["10.0.0.2", "10.0.0.1"]),  # no node is large enough for the stage
        ((3.0, 1.0), 2, 2, 4, ["10.0.0.2", "10.0.0.1", "10.0.0.1", "10.0.0.1"]),
    ],
)
def test_stages_stay_together_where_they_fit(monkeypatch, cpus, tp, pp, bundles, nodes):
    ray = FakeRay({"10.0.0.1": {"CPU": cpus[0]}, "10.0.0.2": {"CPU": cpus[1]}}).install(monkeypatch)
    cluster = RayCluster(1)
    room = cluster.reserve(bundle_plans(tp, pp, {"CPU": 1}), 60)
    assert room.plan.num_bundles == bundles
    assert room.nodes == nodes
    cluster.give_back(room)
    assert ray.removed == [room.group]
    cluster.close()


def test_a_stage_that_finds_no_room_in_time_is_taken_apart(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    ray.free = {"10.0.0.1": {"CPU": 1.0}, "10.0.0.2": {"CPU": 1.0}}  # somebody else is there
    cluster = RayCluster(1)
    assert cluster.reserve(bundle_plans(2, 1, {"CPU": 1}), 60).nodes == ["10.0.0.2", "10.0.0.1"]
    assert [round(timeout_s) for timeout_s in ray.waited] == [5, 60]
    assert len(ray.removed) == 1
    cluster.close()


def test_no_room_is_told_with_numbers(monkeypatch):
    ray = FakeRay(TWO_NODES).install(monkeypatch)
    cluster = RayCluster(1)
    with pytest.raises(ConfigError, match=r"no room for 6 workers of 1 CPU each within 3 s; its 2 nodes: 10\.0\.0\.1"):
        cluster.reserve(bundle_plans(2, 3, {"CPU": 1}), 3)
    assert ray.removed == ray.groups
    cluster.close()
