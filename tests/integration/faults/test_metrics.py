"""Two API servers, one page of metrics: whoever is asked answers for both, and for those that died."""

import contextlib
import os
import signal
import threading
from functools import partial

import httpx
import pytest

from tests.fakes.wire_metrics import wire_samples
from tests.integration.faults.lab import Server, wait_for

NUM_TOKENS = 7
BODY = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
GENERATED, PROMPTS = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
FIRST_TOKENS, ENDED = "vllm:time_to_first_token_seconds_count", "vllm:request_success_total"
FOREVER = httpx.Limits(keepalive_expiry=None)
"""A new connection may reach the other API server."""
GROWING = ("_total", "_count", "_sum", "_bucket")


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(
        checkpoint, "--api-server-count", 2, "--timeout-keep-alive", 600, scripted=True, LAB_STEP_S=0.01
    ) as server:
        yield server


@pytest.fixture
def connect(server):
    """`connect()` -> a connection to each of the two, by process id; they stay open, so each reaches its own."""
    with contextlib.ExitStack() as stack:

        def connections():
            found = {}

            def both():
                client = stack.enter_context(httpx.Client(base_url=server.url, timeout=300, limits=FOREVER))
                found.setdefault(client.get("/lab/figures").json()["pid"], client)
                return len(found) == 2

            wait_for(both, "a connection to both")
            return found

        yield connections


def send(client, method, path, **options):
    answer = client.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return answer.content


def ask(client, count):
    for _ in range(count):
        send(client, "POST", "/v1/completions", json=BODY)


def scrape(client):
    return wire_samples(send(client, "GET", "/metrics"))


def total(page, name):
    return sum(value for (found, _), value in page.items() if found == name)


def runs(client, count):
    return total(scrape(client), "vllm:num_requests_running") == count


def counters(page):
    return {key: value for key, value in page.items() if key[0].endswith(GROWING)}


def check_grown(before, after):
    shrunk = {key: (value, after[key]) for key, value in counters(before).items() if after[key] < value}
    assert not shrunk


def test_each_answers_for_both_and_counters_never_shrink(connect):
    first, second = connect().values()
    begin = scrape(first)
    threads = [threading.Thread(target=ask, args=(client, 15)) for client in connect().values()]
    for thread in threads:
        thread.start()
    pages = [begin]
    while any(thread.is_alive() for thread in threads):
        for client in (first, second):
            pages.append(scrape(client))
            check_grown(pages[-2], pages[-1])

    def both_say_all():
        pages[:] = [scrape(first), scrape(second)]
        complete = all(total(page, GENERATED) - total(begin, GENERATED) == 30 * NUM_TOKENS for page in pages)
        return complete and counters(pages[0]) == counters(pages[1])

    wait_for(both_say_all, "the counts of both")
    for name, each in ((PROMPTS, 3), (FIRST_TOKENS, 1), (ENDED, 1)):
        assert total(pages[0], name) - total(begin, name) == 30 * each
    assert total(pages[0], "vllm:cache_config_info") == 1, "one engine"


def test_gauges_are_those_of_the_engine_not_twice(server, connect):
    (first, second), others = connect().values(), connect().values()
    body = BODY | {"max_tokens": 490, "stream": True}
    with (
        server.pace(0.25),
        first.stream("POST", "/v1/completions", json=body) as one,
        second.stream("POST", "/v1/completions", json=body) as two,
    ):
        lines = [one.iter_lines(), two.iter_lines()]  # kept: a response ends with its iterator
        for line in lines:
            next(line)
        for client in others:
            wait_for(partial(runs, client, 2), "both requests")
    server.wait_empty()


def test_what_a_killed_one_had_counted_stays(server, connect):
    found = connect()
    for client in found.values():
        ask(client, 3)
    victim = server.pid("api server 1")
    survivor = next(client for pid, client in found.items() if pid != victim)
    scrape(survivor)  # it tells what it has counted when it is asked, else now and then
    before = scrape(found[victim])  # shown, so it is counted for good
    os.kill(victim, signal.SIGKILL)
    check_grown(before, scrape(survivor))
    wait_for(lambda: server.pid("api server 1") != victim, "a new one")
    again = connect()
    for client in again.values():
        check_grown(before, scrape(client))
        ask(client, 2)

    def four_more():
        pages = [scrape(client) for client in again.values()]
        return all(total(page, GENERATED) - total(before, GENERATED) == 4 * NUM_TOKENS for page in pages)

    wait_for(four_more, "the counts of the new one")
