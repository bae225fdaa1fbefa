"""Threads and CPUs of workers, on machines of several kinds."""

import pytest

from pagemill.config.rules.thread_plan import ThreadRequest, plan_threads
from pagemill.errors import ConfigError
from tests.fakes.machines import machine


def request(num_workers=1, bind="auto", threads=None, front_end=True, own_process=True):
    return ThreadRequest(bind, threads, num_workers, front_end, own_process)


@pytest.fixture
def plan(tmp_path):
    def make(num_nodes, cores_per_node, *args, allowed=None, **wishes):
        return plan_threads(machine(tmp_path, num_nodes, cores_per_node).topology(allowed), request(*args, **wishes))

    return make


def ranges(plan):
    return [(cpus[0], cpus[-1], len(cpus)) for cpus in plan.cpus]


def test_few_cores_are_not_bound_and_none_is_left_out(plan):
    assert (plan(1, 2).threads, plan(1, 2).cpus) == (2, ())
    assert (plan(1, 7).threads, plan(1, 7).cpus) == (7, ())
    assert plan(1, 6, 2).threads == 3
    assert plan(1, 2, 4).threads == 1


def test_one_core_is_left_to_the_front_end(plan):
    assert (plan(1, 8).threads, ranges(plan(1, 8))) == (7, [(1, 7, 7)])
    assert (plan(1, 8, front_end=False).threads, ranges(plan(1, 8, front_end=False))) == (8, [(0, 7, 8)])


def test_workers_have_cores_of_their_own_in_one_node_each(plan):
    made = plan(2, 8, 4, front_end=False)
    assert (made.threads, ranges(made)) == (4, [(0, 3, 4), (4, 7, 4), (8, 11, 4), (12, 15, 4)])
    made = plan(2, 8, 2)
    assert (made.threads, ranges(made)) == (8, [(1, 7, 7), (8, 15, 8)])


def test_what_does_not_divide_is_left_to_the_front_end(plan):
    # The second node has three workers, and one core more than they share out: no worker gives one up.
    made = plan(2, 10, 5)
    assert ranges(made) == [(0, 4, 5), (5, 9, 5), (11, 13, 3), (14, 16, 3), (17, 19, 3)]


def test_fewer_workers_than_nodes_have_whole_nodes(plan):
    assert ranges(plan(2, 8, front_end=False)) == [(0, 15, 16)]
    assert ranges(plan(4, 4, 2, front_end=False)) == [(0, 7, 8), (8, 15, 8)]
    assert ranges(plan(3, 4, 2, front_end=False)) == [(0, 3, 4), (4, 11, 8)]


def test_threads_that_fit_into_a_node_stay_in_one(plan):
    made = plan(2, 8, threads=6)
    assert (made.threads, ranges(made)) == (6, [(0, 7, 8)])
    assert ranges(plan(2, 8, threads=9)) == [(0, 15, 16)]


def test_more_threads_or_workers_than_cores_are_not_bound(plan):
    assert (plan(1, 8, 2, threads=5).threads, plan(1, 8, 2, threads=5).cpus) == (5, ())
    assert (plan(1, 8, 12).threads, plan(1, 8, 12).cpus) == (1, ())


def test_one_cpu_of_a_core_is_used_though_the_mask_has_both(plan):
    made = plan(1, 8, allowed=[2, 10, 3, 11, 4, 5, 6, 7, 0, 9], front_end=False)
    assert made.cpus == ((0, 2, 3, 4, 5, 6, 7, 9),)


def test_nobind(plan):
    assert (plan(2, 8, 2, bind="nobind").threads, plan(2, 8, 2, bind="nobind").cpus) == (7, ())


def test_a_process_of_the_caller_is_not_bound(plan):
    made = plan(1, 16, front_end=False, own_process=False)
    assert (made.threads, made.cpus) == (16, ())


def test_under_a_quota_threads_are_fewer_and_not_bound(tmp_path):
    there = machine(tmp_path, 2, 16)
    there.file("proc/self/cgroup", "0::/")
    there.file("sys/fs/cgroup/cpu.max", "1200000 100000")
    made = plan_threads(there.topology(), request())
    assert (made.threads, made.cpus) == (11, ())
    assert "12 CPUs are allowed" in made.why


def test_lists_that_are_given(plan):
    made = plan(1, 2, 2, bind="0|1")
    assert (made.threads, made.cpus) == (1, ((0,), (1,)))
    made = plan(2, 4, 2, bind="0-2,9|4-7", own_process=False)
    assert (made.threads, made.cpus) == (4, ((0, 1, 2, 9), (4, 5, 6, 7)))
    assert plan(1, 4, bind="0-3", threads=2).threads == 2


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"bind": "0-8"}, r"cpu_threads_bind='0-8': CPUs 8 do not exist or are offline; allowed: 0-2,4-6"),
        ({"bind": "0,3,7"}, r"may not use CPUs 3,7, by its affinity mask; allowed: 0-2,4-6"),
        ({"bind": "0|1"}, r"cpu_threads_bind='0\|1' has 2 lists for 1 workers .*one list per worker"),
        ({"bind": "0-2", "threads": 4}, r"cpu_threads=4 is more than the 3 CPUs of a list of cpu_threads_bind='0-2'"),
        ({"bind": "0-x"}, r"cpu_threads_bind='0-x' is not allowed: '0-x' is not .*auto, nobind, or a list"),
        ({"bind": "0-2|2-4", "num_workers": 2}, r"CPUs 2 are in two lists"),
        ({"bind": "0||1", "num_workers": 3}, r"'' is not a CPU"),
    ],
)
def test_lists_that_cannot_be(plan, wishes, message):
    with pytest.raises(ConfigError, match=message):
        plan(1, 4, allowed=[0, 1, 2, 4, 5, 6], **wishes)
