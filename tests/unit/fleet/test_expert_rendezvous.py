"""Who must start again when one of several engines that share experts is gone, and where they meet next."""

from pagemill.fleet.expert_rendezvous import ExpertRendezvous


def test_all_meet_at_one_place():
    rendezvous = ExpertRendezvous(3, "/run")
    places = [rendezvous.join(index, 0) for index in range(3)]
    assert {place.address for place in places} == {"file:///run/experts-0"}
    assert [(place.replica, place.num_replicas) for place in places] == [(0, 3), (1, 3), (2, 3)]


def test_the_first_that_is_gone_ends_a_rendezvous_and_the_others_follow():
    rendezvous = ExpertRendezvous(3, "/run")
    for index in range(3):
        rendezvous.join(index, 0)
    assert rendezvous.leave(1, 0) == [(0, 0), (2, 0)]
    assert rendezvous.leave(0, 0) is rendezvous.leave(2, 0) is None
    assert {rendezvous.join(index, 1).address for index in range(3)} == {"file:///run/experts-1"}
    assert rendezvous.leave(2, 1) == [(0, 1), (1, 1)]


def test_one_that_was_never_there_takes_nobody_with_it():
    rendezvous = ExpertRendezvous(2, "/run")
    rendezvous.join(0, 0)
    assert rendezvous.leave(1, 0) is None
    rendezvous.join(1, 0)
    assert rendezvous.leave(0, 7) is None


def test_one_that_was_back_first_waits_for_the_others():
    rendezvous = ExpertRendezvous(2, "/run")
    for index in range(2):
        rendezvous.join(index, 0)
    assert rendezvous.leave(0, 0) == [(1, 0)]
    again = rendezvous.join(0, 1)
    assert rendezvous.leave(1, 0) is None
    assert rendezvous.join(1, 1).address == again.address
