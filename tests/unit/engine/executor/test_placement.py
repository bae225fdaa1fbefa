"""Workers on nodes: whole stages where they fit, neighbours otherwise, and a shortage in words."""

import pytest

from pagemill.engine.executor.placement import (
    BundlePlan,
    bundle_of_ranks,
    bundle_plans,
    describe_shortage,
    local_ranks,
)


def test_a_stage_is_asked_for_in_one_piece_first():
    assert bundle_plans(4, 2, {"GPU": 1, "CPU": 2}) == [
        BundlePlan(2, 4, {"GPU": 4, "CPU": 8}),
        BundlePlan(8, 1, {"GPU": 1, "CPU": 2}),
    ]
    assert bundle_plans(1, 3, {"CPU": 2}) == [BundlePlan(3, 1, {"CPU": 2})]


@pytest.mark.parametrize(
    ("nodes", "fits"),
    [
        ([{"CPU": 4.0}], True),
        ([{"CPU": 2.0}, {"CPU": 2.0}], True),
        ([{"CPU": 3.0}], False),
        ([{"CPU": 3.0}, {"CPU": 1.0}], False),  # a bundle is on one node
        ([{"GPU": 8.0}], False),
        ([], False),
    ],
)
def test_whether_nodes_have_room(nodes, fits):
    assert BundlePlan(2, 2, {"CPU": 2}).fits(nodes) is fits


def test_ranks_of_a_node_are_consecutive_and_the_fullest_node_is_first():
    nodes = ["b", "a", "b", "c", "b", "a"]
    assert bundle_of_ranks(nodes, 1) == [0, 2, 4, 1, 5, 3]
    assert bundle_of_ranks(["b", "a"], 2) == [1, 1, 0, 0]


def test_local_ranks_count_per_node():
    assert local_ranks(["b", "b", "a", "b", "a"]) == [0, 1, 0, 2, 1]


def test_a_shortage_says_what_there_is_and_what_is_needed():
    plan = BundlePlan(4, 1, {"GPU": 1, "CPU": 2})
    text = describe_shortage(plan, {"10.0.0.1": {"GPU": 2.0, "CPU": 16.0}, "10.0.0.2": {"CPU": 8.0}}, 60)
    assert text == (
        "the Ray cluster had no room for 4 workers of 1 GPU and 2 CPU each within 60 s; its 2 nodes: "
        "10.0.0.1 has 2 GPU and 16 CPU; 10.0.0.2 has 0 GPU and 8 CPU; that is not enough"
    )
    assert "not all of it is free" in describe_shortage(plan, {"10.0.0.1": {"GPU": 4.0, "CPU": 8.0}}, 60)
    assert "its 0 nodes: none" in describe_shortage(plan, {}, 60)
