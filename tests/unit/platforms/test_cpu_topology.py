"""The machine as /sys shows it, for machines of several kinds."""

import os

import pytest

from pagemill.platforms.cpu_topology import Core, read_topology
from tests.fakes.machines import Machine, machine


def cpus(topology):
    return [core.cpu for core in topology.cores]


def test_siblings_are_one_core(tmp_path):
    topology = machine(tmp_path, 1, 4).topology()
    assert topology.cores == tuple(Core(cpu, 0) for cpu in range(4))
    assert topology.nodes == dict.fromkeys(range(8), 0)
    assert (topology.num_threads, topology.limited) == (4, False)


def test_siblings_side_by_side(tmp_path):
    topology = Machine(tmp_path, [[[0, 1], [2, 3]]]).write().topology()
    assert cpus(topology) == [0, 2]


def test_two_sockets(tmp_path):
    topology = machine(tmp_path, 2, 3).topology()
    assert topology.cores == (*(Core(cpu, 0) for cpu in (0, 1, 2)), *(Core(cpu, 1) for cpu in (3, 4, 5)))
    assert topology.nodes_of([9, 4]) == (1,)
    assert topology.nodes_of([0, 11]) == (0, 1)


def test_a_mask_with_holes(tmp_path):
    topology = machine(tmp_path, 2, 4).topology(allowed=[1, 3, 11, 12, 6])
    # 3 and 11 are one core; of that of 4 and 12 only the second may be used.
    assert topology.cores == (Core(1, 0), Core(3, 0), Core(6, 1), Core(12, 1))
    assert topology.nodes.keys() == {1, 3, 6, 11, 12}
    assert topology.online == set(range(16))


def test_offline_cpus(tmp_path):
    topology = machine(tmp_path, 1, 4, offline={2, 4}).topology()
    # Without its first CPU, a core is there with its second.
    assert cpus(topology) == [0, 1, 3, 6]
    assert topology.online == {0, 1, 3, 5, 6, 7}


def test_nodes_of_memory_only_do_not_occur(tmp_path):
    there = machine(tmp_path, 1, 2)
    there.file("sys/devices/system/node/node1/cpulist", "")
    assert {core.node for core in there.topology().cores} == {0}


def test_nothing_is_said(tmp_path):
    topology = read_topology(tmp_path, [4, 5])
    assert topology.cores == (Core(4, 0), Core(5, 0))
    assert (topology.online, topology.quota) == ({4, 5}, None)


def test_a_quota_of_unified_groups_is_the_least_on_the_way(tmp_path):
    there = machine(tmp_path, 1, 8)
    there.file("proc/self/cgroup", "0::/pods/mine")
    there.file("sys/fs/cgroup/pods/cpu.max", "250000 100000")
    there.file("sys/fs/cgroup/pods/mine/cpu.max", "max 100000")
    assert (there.topology().quota, there.topology().num_threads, there.topology().limited) == (2.5, 2, True)


def test_a_quota_inside_a_container_whose_groups_have_the_names_of_the_host(tmp_path):
    there = machine(tmp_path, 1, 8, smt=False)
    there.file("proc/self/cgroup", "0::/pods/mine")
    there.file("sys/fs/cgroup/cpu.max", "50000 100000")
    assert (there.topology().quota, there.topology().num_threads) == (0.5, 1)


@pytest.mark.parametrize(("quota_us", "quota"), [("300000", 3.0), ("-1", None)])
def test_a_quota_of_separate_groups(tmp_path, quota_us, quota):
    there = machine(tmp_path, 1, 8)
    there.file("proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/a\n0::/")
    there.file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", quota_us)
    there.file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    there.file("sys/fs/cgroup/memory/a/cpu.cfs_quota_us", "1")
    assert there.topology().quota == quota


def test_a_quota_of_as_many_cpus_as_there_are_is_no_limit(tmp_path):
    there = machine(tmp_path, 1, 4)
    there.file("proc/self/cgroup", "0::/")
    there.file("sys/fs/cgroup/cpu.max", "400000 100000")
    assert (there.topology().num_threads, there.topology().limited) == (4, False)


def test_this_machine():
    topology = read_topology()
    assert topology.nodes.keys() == os.sched_getaffinity(0)
    assert 1 <= topology.num_threads <= len(topology.cores) <= len(topology.nodes)
