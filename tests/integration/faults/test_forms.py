"""Outputs with a form on whole servers: the same text whatever happens around it, and nothing is left of any."""

import asyncio
import json
import re

import httpx
import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.wire_metrics import wire_samples
from tests.integration.faults.lab import LONG, PATIENCE_S, Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, same

FORMS = [
    {"regex": "([a-z] ){40}"},
    {"json": {"type": "array", "items": {"enum": ["a b c d", 17, None]}, "minItems": 12, "maxItems": 20}},
    {"regex": "([0-9a-f]{1,3} ){30}"},
    {"grammar": 'root ::= ("yes " | "no " [0-9] " ")+'},
    {"choice": ["one two three four", "one two three five", "six"]},
    {"structural_tag": {"format": {"type": "tag", "begin": "<a> ", "end": " </a>",
                                   "content": {"type": "regex", "pattern": "([a-z]{2} ){20}"}}}},
]  # fmt: skip
COMPLETIONS = "/v1/completions"
COUNT = 28 if LONG else 14
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Every byte is a token."""
    return make_checkpoint(tmp_path_factory.mktemp("bytes"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def server(checkpoint):
    """With blocks for a few requests only."""
    few = ("--max-model-len", 208, "--num-gpu-blocks-override", 30, "--max-num-seqs", 24)
    with Server(checkpoint, *few) as server:
        yield server


def with_forms(count, **fields):
    """Requests with forms by turns, greedy and seeded ones, streams and others, and some that are free."""
    return [
        {
            "prompt": "".join(chr(97 + (31 * number + 7 * place) % 26) for place in range(20 + number % 11)),
            "max_tokens": 120,
            "temperature": 0 if number % 3 == 0 else 1.2,
            "seed": number,
            "stream": number % 2 == 0,
        }
        | ({} if number % 7 == 6 else {"structured_outputs": FORMS[number % 7 % len(FORMS)]})
        | fields
        for number in range(count)
    ]


async def one_by_one(server, requests):
    return [(await ask_all(server, [request]))[0] for request in requests]


@pytest.fixture(scope="module")
def calm(server):
    """What each request gets that is alone."""
    answers = asyncio.run(one_by_one(server, with_forms(COUNT)))
    ended = 0
    for request, answer in zip(with_forms(COUNT), answers, strict=True):
        assert answer.status == 200, answer.error
        if answer.finish == {0: "stop"} and "structured_outputs" in request:
            check_form(request["structured_outputs"], answer.texts[0])
            ended += 1
    assert ended >= 4
    return answers


async def until(traffic, num_words):
    """Until all streams together have so many."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(answer.num_tokens for answer in traffic.answers_so_far) < num_words:
            await asyncio.sleep(0.005)


def check_form(form, text):
    if "regex" in form:
        assert re.fullmatch(form["regex"], text)
    elif "choice" in form:
        assert text in form["choice"]
    elif "json" in form:
        assert all(item in form["json"]["items"]["enum"] for item in json.loads(text))
    elif "structural_tag" in form:
        assert re.fullmatch("<a> ([a-z]{2} ){20} </a>", text)


def figure(server, name):
    page = wire_samples(httpx.get(server.url + "/metrics", timeout=60).content)
    return sum(value for (found, _), value in page.items() if found == name)


async def test_preempted_outputs_are_those_of_a_calm_server(server, calm):
    before = figure(server, "vllm:num_preemptions_total")
    assert same(await ask_all(server, with_forms(COUNT)), calm)
    assert figure(server, "vllm:num_preemptions_total") > before
    server.wait_empty()


@pytest.mark.parametrize("num_kills", [1, *long_only(3)])
async def test_an_engine_that_is_killed_goes_on_in_the_middle_of_forms(server, calm, num_kills):
    async with Traffic(server, with_forms(COUNT)) as traffic:
        for number in range(num_kills):
            await until(traffic, 20 + 60 * number)
            assert traffic.is_running()
            server.kill("engine core 0")
        assert same(await traffic.answers(), calm)
    server.wait_empty()


async def test_clients_that_leave_leave_nothing_of_their_forms(server, calm):
    for _ in range(10 if LONG else 2):
        async with Traffic(server, with_forms(COUNT, stream=True)) as traffic:
            await until(traffic, 30)
            assert traffic.is_running()
    server.wait_empty()
    wait_for(lambda: [figure(server, name) for name in METRICS] == [0, 0], "empty metrics")
    figures = server.figures()
    assert (figures["in_flight"], figures["remembered"]) == (0, 0)
    assert same(await one_by_one(server, with_forms(3)), calm[:3])


async def test_a_client_that_leaves_while_its_grammar_is_made_leaves_nothing(server):
    bodies = [
        {"prompt": "a", "structured_outputs": {"regex": f"(x{number}|a{{1,200}}b){{1,40}}"}, "max_tokens": 4}
        for number in range(20)
    ]
    async with httpx.AsyncClient(timeout=60) as client:
        asked = [asyncio.create_task(client.post(server.url + COMPLETIONS, json=body)) for body in bodies]
        await asked[0]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    server.wait_empty()
    wait_for(lambda: server.figures()["in_flight"] == 0, "that none is in flight")


async def ask(server, **fields):
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(server.url + COMPLETIONS, json={"prompt": "Say:", "max_tokens": 90} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("number", [0, *long_only(1, 2, 4, 5)])
async def test_several_completions_and_logprobs_of_a_form(server, number):
    form = FORMS[number]
    fields = {"structured_outputs": form, "temperature": 1.2, "seed": 3, "n": 4}
    plain = await ask(server, **fields)
    scored = await ask(server, **fields, logprobs=2)
    assert [choice["text"] for choice in scored] == [choice["text"] for choice in plain]
    for choice in scored:
        if choice["finish_reason"] == "stop":
            check_form(form, choice["text"])
        found = choice["logprobs"]
        assert "".join(found["tokens"]).startswith(choice["text"])
        assert len(found["token_logprobs"]) == len(found["tokens"])
        assert all(value <= 0 for value in found["token_logprobs"])
    assert form == FORMS[4] or len({choice["text"] for choice in plain}) > 1


async def test_beams_of_a_form_are_refused_by_name(server):
    body = {"prompt": "a", "structured_outputs": FORMS[0], "use_beam_search": True, "n": 3, "temperature": 0}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(server.url + COMPLETIONS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search")


WAYS = {
    "tp": ("-tp", 2, "--async-scheduling"),
    "pp": ("-pp", 2),
    "dp": ("-dp", 2, "--data-parallel-balancer", "round_robin"),
    "lockstep": ("-dp", 2, "--data-parallel-lockstep", "--async-scheduling"),
    "api servers": ("--api-server-count", 3, "--async-scheduling"),
    "waiting": ("--no-async-scheduling",),
    "xgrammar": ("--structured-outputs-config", '{"backend": "xgrammar"}'),
}


@pytest.mark.parametrize("way", ["tp", "xgrammar", *long_only("pp", "dp", "lockstep", "api servers", "waiting")])
async def test_outputs_are_those_of_one_engine(checkpoint, calm, way):
    """However many it is made of, and whatever follows the grammars: every byte is a token, so a text is written in one
    way only, and masks are equal."""
    with Server(checkpoint, "--max-model-len", 208, *WAYS[way]) as server:
        assert same(await ask_all(server, with_forms(COUNT)), calm)
        server.wait_empty()
