"""What is remembered of requests, and who is blamed for a crash."""

import random

import pytest

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from pagemill.serve.client.in_flight import MAX_CRASHES, MAX_LOST_LINKS, PROBATION_TOKENS, InFlightRequests
from tests.fakes.engine_setup import core_request


def ledger_of(*names, engine=0):
    in_flight = InFlightRequests()
    for name in names:
        in_flight.place(in_flight.add(core_request(name, 3)), engine)
    return in_flight


def send_all(in_flight, engine=0):
    entries = in_flight.to_send()
    return {entry.request.request_id: in_flight.place(entry, engine) for entry in entries}


def tokens(in_flight, name, *token_ids):
    for token_id in token_ids:
        in_flight.note(EngineCoreOutputs(request_ids=[name], token_ids=[token_id]))


def test_a_request_goes_on_after_its_emitted_tokens():
    in_flight = ledger_of("a", "b")
    in_flight.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[5])]))
    tokens(in_flight, "a", 6)
    assert in_flight.engine_died(0, "killed") == []
    assert in_flight.num_on(0) == 0
    sent = send_all(in_flight, engine=1)
    assert sent["a"].emitted_token_ids == [5, 6]
    assert sent["a"].prompt_token_ids == [1, 2, 3]
    assert sent["b"].emitted_token_ids == []
    assert in_flight.num_on(1) == 2
    assert in_flight.to_send() == []


def test_emitted_tokens_of_the_client_come_first():
    in_flight = InFlightRequests()
    in_flight.place(in_flight.add(core_request("a", 3, emitted=[7])), 0)
    tokens(in_flight, "a", 8)
    in_flight.engine_died(0, "killed")
    assert send_all(in_flight)["a"].emitted_token_ids == [7, 8]


def test_finished_and_aborted_requests_are_forgotten():
    in_flight = ledger_of("a", "b", "c")
    in_flight.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", finish=Finish(FinishReason.STOP))]))
    assert [entry.request.request_id for entry in in_flight.remove(["b", "unknown"])] == ["b"]
    assert len(in_flight) == 1
    assert "c" in in_flight
    assert in_flight.num_on(0) == 1
    tokens(in_flight, "a", 1)
    in_flight.engine_died(0, "killed")
    assert list(send_all(in_flight)) == ["c"]


def test_only_the_requests_of_the_dead_engine_move():
    in_flight = ledger_of("a")
    in_flight.place(in_flight.add(core_request("b", 3)), 1)
    in_flight.engine_died(1, "killed")
    assert list(send_all(in_flight)) == ["b"]


def test_alone_in_two_crashes_is_rejected():
    in_flight = ledger_of("poison")
    assert in_flight.engine_died(0, "killed") == []
    send_all(in_flight)
    (output,) = in_flight.engine_died(0, "killed by SIGSEGV")
    assert output.request_id == "poison"
    assert output.finish.reason is FinishReason.ERROR
    assert "died 2 times" in output.finish.message
    assert "SIGSEGV" in output.finish.message
    assert len(in_flight) == 0
    assert in_flight.to_send() == []


def test_of_several_suspects_one_at_a_time_is_tried():
    in_flight = ledger_of("a", "poison", "b")
    in_flight.engine_died(0, "1")
    assert set(send_all(in_flight)) == {"a", "poison", "b"}
    assert in_flight.engine_died(0, "2") == []
    in_flight.place(in_flight.add(core_request("new", [9])), 0)
    assert list(send_all(in_flight)) == ["a"]
    assert not in_flight.probation_is_over()
    tokens(in_flight, "a", *range(PROBATION_TOKENS))
    assert in_flight.probation_is_over()
    assert list(send_all(in_flight)) == ["poison"]
    assert in_flight.engine_died(0, "3") == [], "it may have been the new one"
    assert list(send_all(in_flight)) == ["a", "b"]
    tokens(in_flight, "b", *range(PROBATION_TOKENS))
    assert list(send_all(in_flight)) == ["poison"]
    assert [output.request_id for output in in_flight.engine_died(0, "4")] == ["poison"]
    assert list(send_all(in_flight)) == ["a", "b", "new"]
    assert not in_flight.probation_is_over()


def test_nobody_is_tried_for_ever():
    in_flight = ledger_of("a", "b")
    failed = []
    for crash in range(3 * MAX_CRASHES):
        failed += [output.request_id for output in in_flight.engine_died(0, str(crash))]
        for _ in range(3):
            send_all(in_flight)
            for name in ("a", "b"):
                tokens(in_flight, name, *range(PROBATION_TOKENS))
    assert sorted(failed) == ["a", "b"]
    assert len(in_flight) == 0


def test_when_the_one_on_probation_ends_the_next_is_tried():
    in_flight = ledger_of("a", "b")
    in_flight.engine_died(0, "1")
    send_all(in_flight)
    in_flight.engine_died(0, "2")
    assert list(send_all(in_flight)) == ["a"]
    in_flight.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", finish=Finish(FinishReason.LENGTH))]))
    assert in_flight.probation_is_over()
    assert list(send_all(in_flight)) == ["b"]


def test_tokens_of_before_the_crash_clear_nobody():
    in_flight = ledger_of("a", "b")
    in_flight.engine_died(0, "1")
    send_all(in_flight)
    for name in ("a", "b"):
        tokens(in_flight, name, *range(PROBATION_TOKENS))
    in_flight.engine_died(0, "2")
    assert [entry.request.request_id for entry in in_flight.to_send()] == ["a"]
    assert [entry.request.request_id for entry in in_flight.to_send()] == ["a"], "no engine was up to take it"


def test_requests_of_an_engine_that_only_followed_another_are_not_suspected():
    in_flight = ledger_of("a")
    for _ in range(MAX_CRASHES):
        assert in_flight.engine_died(0, "another is gone", follows=True) == []
        assert list(send_all(in_flight)) == ["a"]
    assert in_flight.engine_died(0, "killed") == []


def served(in_flight, poisons, max_crashes=100):
    """Let one engine after the other work on everything, which a poison kills with its first step; who failed."""
    failed = []
    for _ in range(max_crashes):
        while not (sent := set(send_all(in_flight))) & poisons:
            on = [entry.request.request_id for entry in in_flight._entries.values() if entry.engine == 0]
            if not sent and len(on) == len(in_flight):
                return failed
            for name in on:
                tokens(in_flight, name, 1)
        failed += [output.request_id for output in in_flight.engine_died(0, "killed")]
    raise AssertionError("the engine died without end")


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("num_poisons", [1, 2, 3, 10])
def test_poisons_of_any_number_fail_nobody_else(num_poisons, order):
    poisons = {f"poison-{number}" for number in range(num_poisons)}
    names = [*poisons, *(f"innocent-{number}" for number in range(5))]
    random.Random(order).shuffle(names)
    in_flight = ledger_of()
    for number, name in enumerate(names):
        in_flight.place(in_flight.add(core_request(name, [number, 2])), 0)
    failed = [output.request_id for output in in_flight.engine_died(0, "killed")]
    assert sorted(failed + served(in_flight, poisons)) == sorted(poisons)


def test_completions_of_one_prompt_fail_together():
    in_flight = InFlightRequests()
    for number in range(64):
        in_flight.add(core_request(f"poison-{number}", 5))
    for number in range(3):
        in_flight.add(core_request(f"innocent-{number}", [8, number]))
    send_all(in_flight)
    poisons = {f"poison-{number}" for number in range(64)}
    assert in_flight.engine_died(0, "1") == []
    assert set(served(in_flight, poisons, max_crashes=3)) == poisons


def test_a_lost_connection_puts_nobody_into_quarantine():
    in_flight = ledger_of("a", "b")
    in_flight.place(in_flight.add(core_request("elsewhere", 3)), 1)
    for _ in range(MAX_LOST_LINKS + MAX_CRASHES):
        tokens(in_flight, "a", 5)
        tokens(in_flight, "b", 6)
        assert in_flight.disconnect(0, "reset") == []
        assert in_flight.num_on(0) == 0
        in_flight.reconnect(0)
        assert set(send_all(in_flight)) == {"a", "b"}
    assert in_flight.get("a").emitted == [5] * (MAX_LOST_LINKS + MAX_CRASHES)
    in_flight.disconnect(0, "reset")
    in_flight.reconnect(0)
    assert in_flight.engine_died(0, "killed") == []
    assert in_flight.get("a").num_crashes == 0


def test_an_engine_that_was_silent_before_it_was_killed_was_killed_by_what_it_had():
    in_flight = ledger_of("poison")
    in_flight.disconnect(0, "silence")
    assert in_flight.engine_died(0, "it hung and was killed") == []
    assert list(send_all(in_flight)) == ["poison"]
    in_flight.disconnect(0, "silence")
    assert [output.request_id for output in in_flight.engine_died(0, "it hung and was killed")] == ["poison"]


def test_a_request_that_breaks_every_connection_ends():
    in_flight = ledger_of("a", "b")
    failed = []
    for _ in range(MAX_LOST_LINKS):
        tokens(in_flight, "b", 1)
        failed += in_flight.disconnect(0, "a message is over the limits")
        in_flight.reconnect(0)
        send_all(in_flight)
    (output,) = failed
    assert output.request_id == "a"
    assert "16 times in a row (a message is over the limits)" in output.finish.message
    assert "b" in in_flight
