"""What agents need to use a server."""

import functools
import json
import tomllib

import httpx
import pytest
import yaml

from pagemill.catalog.agents import AGENTS, CHAT
from pagemill.cli import server_facts
from pagemill.cli.connect import instructions
from pagemill.cli.main import main
from pagemill.cli.server_facts import ServerFacts
from tests.fakes.openai_server import FakeOpenAIServer

URL, MODEL = "http://10.0.0.1:8000", "org/some-model"


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("has_key", [True, False])
def test_every_agent_gets_address_and_model(name: str, has_key: bool) -> None:
    text = instructions(AGENTS[name], URL, MODEL, has_key)
    assert URL in text and MODEL in text and text.endswith("\n")
    assert "{url}" not in text and "{model}" not in text
    assert has_key or "$PAGEMILL_API_KEY" not in text


def test_configurations_are_well_formed() -> None:
    text = {name: instructions(agent, URL, MODEL, True) for name, agent in AGENTS.items()}
    opencode = json.loads(text["opencode"].partition("opencode.json\n")[2])
    assert opencode["provider"]["pagemill"]["options"] == {"baseURL": f"{URL}/v1", "apiKey": "{env:OPENAI_API_KEY}"}
    assert opencode["provider"]["pagemill"]["models"] == {MODEL: {}}
    assert tomllib.loads(text["codex"])["model_providers"]["pagemill"]["base_url"] == f"{URL}/v1"
    assert yaml.safe_load(text["continue"])["models"][0]["apiKey"] == "${{ secrets.OPENAI_API_KEY }}"
    assert yaml.safe_load(text["llm"])[0]["api_base"] == f"{URL}/v1"


def serving(monkeypatch: pytest.MonkeyPatch, *paths: str, models: object = None) -> list[httpx.Request]:
    """A server that has these endpoints; the requests that it gets."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=models or {"data": [{"id": MODEL}]})
        return httpx.Response(400 if request.url.path in paths else 404, json={"error": {"message": "no"}})

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(server_facts, "ServerFacts", functools.partial(ServerFacts, transport=transport))
    return seen


def test_the_server_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = serving(monkeypatch, CHAT)
    assert main(["connect", "openai", "--url", f"{URL}/v1/", "--api-key", "sk-secret"]) == 0
    out = capsys.readouterr().out
    assert f'OPENAI_BASE_URL="{URL}/v1"' in out and "sk-secret" not in out and "$PAGEMILL_API_KEY" in out
    assert [request.url.path for request in seen] == ["/v1/models", CHAT]
    assert {request.headers["authorization"] for request in seen} == {"Bearer sk-secret"}


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serving(monkeypatch, CHAT)
    assert main(["connect", "claude-code", "--url", URL, "--model", "m"]) == 1
    assert f"the server at {URL} has no /v1/messages, which Claude Code uses" in capsys.readouterr().err
    serving(monkeypatch, CHAT, models={"data": []})
    assert main(["connect", "openai", "--url", URL]) == 1
    assert "something that is no list of models" in capsys.readouterr().err


def test_no_server_and_no_agent(capsys: pytest.CaptureFixture[str], server: FakeOpenAIServer) -> None:
    assert main(["connect", "curl", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9: start one with 'pagemill serve'" in capsys.readouterr().err
    assert main(["connect", "nobody"]) == 2
    assert "invalid choice: 'nobody'" in capsys.readouterr().err
    assert main(["connect", "curl", "--url", "nonsense"]) == 1
    assert "is not of the form http://host:port" in capsys.readouterr().err
