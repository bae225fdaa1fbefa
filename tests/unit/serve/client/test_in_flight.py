"""What is remembered of requests, and who is blamed for a crash."""

import random

import pytest

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from pagemill.serve.client.in_flight import CLEARING_TOKENS, MAX_CRASHES, MAX_LOST_LINKS, Ledger
from tests.fakes.engine_setup import core_request


def ledger_of(*names, engine=0):
    ledger = Ledger()
    for name in names:
        ledger.place(ledger.add(core_request(name, 3)), engine)
    return ledger


def send_all(ledger, engine=0):
    entries = ledger.to_send()
    return {entry.request.request_id: ledger.place(entry, engine) for entry in entries}


def tokens(ledger, name, *token_ids):
    for token_id in token_ids:
        ledger.note(EngineCoreOutputs(request_ids=[name], token_ids=[token_id]))


def test_a_request_goes_on_after_its_emitted_tokens():
    ledger = ledger_of("a", "b")
    ledger.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[5])]))
    tokens(ledger, "a", 6)
    assert ledger.bury(0, "killed") == []
    assert ledger.num_on(0) == 0
    sent = send_all(ledger, engine=1)
    assert sent["a"].emitted_token_ids == [5, 6]
    assert sent["a"].prompt_token_ids == [1, 2, 3]
    assert sent["b"].emitted_token_ids == []
    assert ledger.num_on(1) == 2
    assert ledger.to_send() == []


def test_emitted_tokens_of_the_client_come_first():
    ledger = Ledger()
    ledger.place(ledger.add(core_request("a", 3, emitted=[7])), 0)
    tokens(ledger, "a", 8)
    ledger.bury(0, "killed")
    assert send_all(ledger)["a"].emitted_token_ids == [7, 8]


def test_finished_and_aborted_requests_are_forgotten():
    ledger = ledger_of("a", "b", "c")
    ledger.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", finish=Finish(FinishReason.STOP))]))
    assert [entry.request.request_id for entry in ledger.remove(["b", "unknown"])] == ["b"]
    assert len(ledger) == 1
    assert "c" in ledger
    assert ledger.num_on(0) == 1
    tokens(ledger, "a", 1)
    ledger.bury(0, "killed")
    assert list(send_all(ledger)) == ["c"]


def test_only_the_requests_of_the_dead_engine_move():
    ledger = ledger_of("a")
    ledger.place(ledger.add(core_request("b", 3)), 1)
    ledger.bury(1, "killed")
    assert list(send_all(ledger)) == ["b"]


def test_alone_in_two_crashes_is_guilty():
    ledger = ledger_of("poison")
    assert ledger.bury(0, "killed") == []
    send_all(ledger)
    (output,) = ledger.bury(0, "killed by SIGSEGV")
    assert output.request_id == "poison"
    assert output.finish.reason is FinishReason.ERROR
    assert "died 2 times" in output.finish.message
    assert "SIGSEGV" in output.finish.message
    assert len(ledger) == 0
    assert ledger.to_send() == []


def test_of_several_suspects_one_at_a_time_is_tried():
    ledger = ledger_of("a", "poison", "b")
    ledger.bury(0, "1")
    assert set(send_all(ledger)) == {"a", "poison", "b"}
    assert ledger.bury(0, "2") == []
    ledger.place(ledger.add(core_request("new", [9])), 0)
    assert list(send_all(ledger)) == ["a"]
    assert not ledger.trial_is_over()
    tokens(ledger, "a", *range(CLEARING_TOKENS))
    assert ledger.trial_is_over()
    assert list(send_all(ledger)) == ["poison"]
    assert ledger.bury(0, "3") == [], "it may have been the new one"
    assert list(send_all(ledger)) == ["a", "b"]
    tokens(ledger, "b", *range(CLEARING_TOKENS))
    assert list(send_all(ledger)) == ["poison"]
    assert [output.request_id for output in ledger.bury(0, "4")] == ["poison"]
    assert list(send_all(ledger)) == ["a", "b", "new"]
    assert not ledger.trial_is_over()


def test_nobody_is_tried_for_ever():
    ledger = ledger_of("a", "b")
    failed = []
    for crash in range(3 * MAX_CRASHES):
        failed += [output.request_id for output in ledger.bury(0, str(crash))]
        for _ in range(3):
            send_all(ledger)
            for name in ("a", "b"):
                tokens(ledger, name, *range(CLEARING_TOKENS))
    assert sorted(failed) == ["a", "b"]
    assert len(ledger) == 0


def test_when_the_one_on_trial_ends_the_next_is_tried():
    ledger = ledger_of("a", "b")
    ledger.bury(0, "1")
    send_all(ledger)
    ledger.bury(0, "2")
    assert list(send_all(ledger)) == ["a"]
    ledger.note(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", finish=Finish(FinishReason.LENGTH))]))
    assert ledger.trial_is_over()
    assert list(send_all(ledger)) == ["b"]


def test_tokens_of_before_the_crash_clear_nobody():
    ledger = ledger_of("a", "b")
    ledger.bury(0, "1")
    send_all(ledger)
    for name in ("a", "b"):
        tokens(ledger, name, *range(CLEARING_TOKENS))
    ledger.bury(0, "2")
    assert [entry.request.request_id for entry in ledger.to_send()] == ["a"]
    assert [entry.request.request_id for entry in ledger.to_send()] == ["a"], "no engine was up to take it"


def test_requests_of_an_engine_that_only_followed_another_are_not_suspected():
    ledger = ledger_of("a")
    for _ in range(MAX_CRASHES):
        assert ledger.bury(0, "another is gone", follows=True) == []
        assert list(send_all(ledger)) == ["a"]
    assert ledger.bury(0, "killed") == []


def served(ledger, poisons, max_crashes=100):
    """Let one engine after the other work on everything, which a poison kills with its first step; who failed."""
    failed = []
    for _ in range(max_crashes):
        while not (sent := set(send_all(ledger))) & poisons:
            on = [entry.request.request_id for entry in ledger._entries.values() if entry.engine == 0]
            if not sent and len(on) == len(ledger):
                return failed
            for name in on:
                tokens(ledger, name, 1)
        failed += [output.request_id for output in ledger.bury(0, "killed")]
    raise AssertionError("the engine died without end")


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("num_poisons", [1, 2, 3, 10])
def test_poisons_of_any_number_fail_nobody_else(num_poisons, order):
    poisons = {f"poison-{number}" for number in range(num_poisons)}
    names = [*poisons, *(f"innocent-{number}" for number in range(5))]
    random.Random(order).shuffle(names)
    ledger = ledger_of()
    for number, name in enumerate(names):
        ledger.place(ledger.add(core_request(name, [number, 2])), 0)
    failed = [output.request_id for output in ledger.bury(0, "killed")]
    assert sorted(failed + served(ledger, poisons)) == sorted(poisons)


def test_completions_of_one_prompt_fail_together():
    ledger = Ledger()
    for number in range(64):
        ledger.add(core_request(f"poison-{number}", 5))
    for number in range(3):
        ledger.add(core_request(f"innocent-{number}", [8, number]))
    send_all(ledger)
    poisons = {f"poison-{number}" for number in range(64)}
    assert ledger.bury(0, "1") == []
    assert set(served(ledger, poisons, max_crashes=3)) == poisons


def test_a_lost_connection_makes_nobody_a_suspect():
    ledger = ledger_of("a", "b")
    ledger.place(ledger.add(core_request("elsewhere", 3)), 1)
    for _ in range(MAX_LOST_LINKS + MAX_CRASHES):
        tokens(ledger, "a", 5)
        tokens(ledger, "b", 6)
        assert ledger.disconnect(0, "reset") == []
        assert ledger.num_on(0) == 0
        ledger.reconnect(0)
        assert set(send_all(ledger)) == {"a", "b"}
    assert ledger.get("a").emitted == [5] * (MAX_LOST_LINKS + MAX_CRASHES)
    ledger.disconnect(0, "reset")
    ledger.reconnect(0)
    assert ledger.bury(0, "killed") == []
    assert ledger.get("a").num_crashes == 0


def test_an_engine_that_was_silent_before_it_was_killed_was_killed_by_what_it_had():
    ledger = ledger_of("poison")
    ledger.disconnect(0, "silence")
    assert ledger.bury(0, "it hung and was killed") == []
    assert list(send_all(ledger)) == ["poison"]
    ledger.disconnect(0, "silence")
    assert [output.request_id for output in ledger.bury(0, "it hung and was killed")] == ["poison"]


def test_a_request_that_breaks_every_connection_ends():
    ledger = ledger_of("a", "b")
    failed = []
    for _ in range(MAX_LOST_LINKS):
        tokens(ledger, "b", 1)
        failed += ledger.disconnect(0, "a message is over the limits")
        ledger.reconnect(0)
        send_all(ledger)
    (output,) = failed
    assert output.request_id == "a"
    assert "16 times in a row (a message is over the limits)" in output.finish.message
    assert "b" in ledger
