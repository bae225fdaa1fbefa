"""Which engines run where: what settings mean, and which of them contradict each other."""

import pytest

from pagemill.config.arguments import make_section
from pagemill.config.facts import DeviceFacts
from pagemill.config.fields import check_values
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.fleet_plan import FleetPlan, api_servers_for, plan_fleet
from pagemill.errors import ConfigError


def plan(size=4, **settings):
    names = {"local": "size_local", "start": "start_rank", "address": "address", "port": "rpc_port"}
    settings = {f"data_parallel_{names[key]}" if key in names else key: value for key, value in settings.items()}
    return plan_fleet(FleetConfig(data_parallel_size=size, **settings))


def test_one_machine_has_all_engines():
    for found in (plan(), plan(local=4), plan(address="10.0.0.1")):
        assert found == FleetPlan(4, range(4))
        assert list(found.remote) == []


def test_the_head_has_the_first_ranks_and_waits_for_the_others():
    found = plan(local=1, address="10.0.0.1", port=7)
    assert (found.local, found.remote, found.head) == (range(1), range(1, 4), ("10.0.0.1", 7))
    assert list(plan(local=0, address="10.0.0.1").remote) == [0, 1, 2, 3]


def test_a_node_has_the_ranks_that_it_is_told_or_all_that_follow():
    node = {"headless": True, "address": "10.0.0.1"}
    assert plan(start=2, **node).local == range(2, 4)
    assert plan(start=1, local=2, **node).local == range(1, 3)
    assert list(plan(start=1, local=2, **node).remote) == []
    assert plan(start=0, local=2, **node).headless


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": 5}, "data_parallel_start_rank=0 and data_parallel_size_local=5 .* data_parallel_size=4"),
        ({"local": 2}, "data_parallel_size_local=2 is less than data_parallel_size=4: --data-parallel-address"),
        ({"start": 2}, "data_parallel_start_rank=2 is for nodes"),
        ({"headless": True}, "headless=True needs --data-parallel-address and --data-parallel-start-rank"),
        ({"headless": True, "start": 2}, "headless=True needs --data-parallel-address: "),
        ({"headless": True, "start": 2, "address": "a", "api_server_count": 1}, "api_server_count=1"),
        ({"headless": True, "start": 4, "address": "a"}, "data_parallel_start_rank=4 and data_parallel_size_local=0"),
        ({"headless": True, "start": 3, "address": "a", "local": 2}, "data_parallel_size_local=2 are not ranks"),
        ({"headless": True, "start": 3, "address": "a", "local": 0}, "data_parallel_size_local=0 are not ranks"),
        ({"port": 65536}, "data_parallel_rpc_port=65536 is not allowed: 1 to 65535"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


@pytest.mark.parametrize(
    ("size", "experts", "wanted", "expected"),
    [
        (2, False, None, False),
        (2, True, None, True),
        (1, False, None, False),
        (2, False, True, True),
        (1, False, True, False),
        (1, True, None, False),
    ],
)
def test_engines_step_together_where_they_share_experts_or_the_user_says_so(size, experts, wanted, expected):
    fleet = FleetConfig(data_parallel_size=size, data_parallel_lockstep=wanted)
    found = plan_fleet(fleet, expert_parallel=experts)
    assert found.lockstep is expected
    assert found.shares_experts is (experts and size > 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_lockstep": False}, "data_parallel_lockstep=False is not allowed with enable_expert_parallel"),
        (
            {"data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1"},
            "data_parallel_size_local=1 of data_parallel_size=2 are on this one",
        ),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_fleet(FleetConfig(data_parallel_size=2, **settings), expert_parallel=True)


@pytest.mark.parametrize(
    ("engines", "cores", "bytes_per_s", "expected"),
    [
        (1, 16, 4.8e12, 2),
        (1, 7, 4.8e12, 1),
        (4, 64, 3.35e12, 8),
        (4, 16, 3.35e12, 4),
        (1, 64, 0.9e12, 1),
        (2, 64, 0.0, 2),
    ],
)
def test_auto_is_two_api_servers_an_engine_on_fast_gpus_with_cores(engines, cores, bytes_per_s, expected):
    machine = DeviceFacts("cuda", cores, 1 << 30, ("bfloat16",), memory_bytes_per_s=bytes_per_s)
    assert api_servers_for(FleetConfig(data_parallel_size=engines, api_server_count="auto"), machine) == expected


def test_api_servers_are_a_number_or_auto():
    assert make_section(FleetConfig, {"api_server_count": "auto"}).api_server_count == "auto"
    assert FleetConfig(data_parallel_size=3).num_api_servers == 3
    with pytest.raises(ConfigError, match="api_server_count='many' is neither a number nor auto"):
        check_values(FleetConfig(api_server_count="many"))
    with pytest.raises(ConfigError, match="api_server_count=0 is too small"):
        check_values(FleetConfig(api_server_count=0))
