"""Three API servers of one model: what one has stored the others find, and the limits of clients are those of all."""

import contextlib
import re
import time

import httpx
import pytest

from tests.integration.faults.lab import Server, wait_for

PATH = "/v1/responses"
BODY = {"input": "hi", "max_output_tokens": 8}
PER_MINUTE = 6
ALL = {"0", "1", "2"}


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = (
        "--chat-template",
        template,
        "--api-server-count",
        3,
        "--response-store-bytes",
        "6M",
        "--uvicorn-log-level",
        "info",
    )
    keys = ("--api-key", "many", "few", "--rate-limit-requests", PER_MINUTE)
    with Server(checkpoint, *arguments, *keys, scripted=True, LAB_STEP_S=0.005, PAGEMILL_SERVER_DEV_MODE=1) as server:
        yield server


def ask(server, method, path, key="many", **body):
    """Over a connection of its own, which any API server may take."""
    return httpx.request(
        method, server.url + path, json=body or None, headers={"authorization": f"Bearer {key}"}, timeout=300
    )


def answered_by(server, path, status):
    """The API servers whose access logs have a line of this kind."""
    return set(re.findall(rf"\[api (\d)\] .* \"\w+ {re.escape(path)} HTTP/1\.1\" {status} ", server.log))


def test_what_one_has_stored_is_found_by_all_until_it_dies(server):
    whole = ask(server, "POST", PATH, **BODY).json()
    path = f"{PATH}/{whole['id']}"

    def asked_of_all():
        assert ask(server, "GET", path).json() == whole
        assert ask(server, "GET", path, key="few").status_code == 404
        return answered_by(server, path, 200) == ALL

    wait_for(asked_of_all, "an answer of each API server")
    after = ask(server, "POST", PATH, **BODY, previous_response_id=whole["id"]).json()
    assert after["previous_response_id"] == whole["id"]
    owner = owner_of(whole["id"])
    assert owner == owner_of(after["id"])
    victim = server.kill(f"api server {owner}")
    wait_for(lambda: server.pid(f"api server {owner}") != victim, "a new API server")

    def is_gone():
        try:
            answer = ask(server, "GET", path)
        except httpx.TransportError:  # it was the one that died
            return False
        assert answer.status_code in (404, 503), answer.text
        return answer.status_code == 404

    wait_for(is_gone, "an API server that knows nothing")


def owner_of(name):
    return str(int(name[-8:], 16) % 3)


def test_a_minute_of_a_key_is_the_same_for_all(server):
    begun = time.monotonic()
    accepted = 0

    def refused_by_all():
        nonlocal accepted
        answer = ask(server, "POST", "/v1/completions", key="few", prompt="a", max_tokens=1)
        assert answer.status_code in (200, 429), answer.text
        accepted += answer.status_code == 200
        return answered_by(server, "/v1/completions", 429) == ALL

    wait_for(refused_by_all, "a refusal of each API server")
    most = PER_MINUTE + (time.monotonic() - begun) * PER_MINUTE / 60
    assert PER_MINUTE <= accepted <= most + 1


def test_all_drain_also_one_that_is_started_later(server):
    def say_so(since, status):
        """Whether each API server has said with this status whether it takes requests."""
        with contextlib.suppress(httpx.TransportError):  # of one that dies
            ask(server, "GET", "/health/ready")
        return set(re.findall(rf"\[api (\d)\] .* /health/ready HTTP/1\.1\" {status} ", server.log[since:])) == ALL

    assert ask(server, "POST", "/drain").json()["status"] == "draining"
    wait_for(lambda: say_so(0, 503), "a refusal of each API server")
    since = len(server.log)
    victim = server.kill("api server 1")
    wait_for(lambda: server.pid("api server 1") != victim, "a new API server")
    wait_for(lambda: say_so(since, 503), "a refusal of each API server")
    since = len(server.log)
    assert ask(server, "POST", "/drain?undo=true").json()["status"] == "serving"
    wait_for(lambda: say_so(since, 200), "each API server")
