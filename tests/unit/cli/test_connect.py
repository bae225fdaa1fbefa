"""What agents need to use a server."""

import functools
import json
import subprocess
import tomllib
from typing import Any

import httpx
import pytest
import yaml

from pagemill.catalog.agents import AGENTS, CHAT
from pagemill.cli import server_facts
from pagemill.cli.connect import instructions
from pagemill.cli.main import main
from pagemill.cli.server_facts import ServerFacts
from tests.fakes.openai_server import FakeOpenAIServer

URL, MODEL, CONTEXT = "http://10.0.0.1:8000", "org/some-model", 4321


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("has_key", [True, False])
def test_every_agent_gets_address_and_model(name: str, has_key: bool) -> None:
    text = instructions(AGENTS[name], URL, MODEL, CONTEXT, has_key)
    assert URL in text and MODEL in text and text.endswith("\n")
    assert "{url}" not in text and "{model}" not in text
    assert has_key or "$PAGEMILL_API_KEY" not in text


def printed(name: str, has_key: bool = True) -> str:
    return instructions(AGENTS[name], URL, MODEL, CONTEXT, has_key)


def json_of(name: str) -> Any:
    """The JSON in what is printed, without the comments before it."""
    lines = printed(name).splitlines()
    return json.loads("\n".join(line for line in lines if not line.startswith("#")))


def variables_of(name: str, has_key: bool) -> dict[str, str]:
    """What a shell has exported after the lines, but for the last one, which starts the agent."""
    lines = [line for line in printed(name, has_key).splitlines() if line.startswith(("export", "#"))]
    script = "\n".join([*lines, "env -0"])
    done = subprocess.run(["sh", "-c", script], env={"PAGEMILL_API_KEY": "sk-1"}, capture_output=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)


def test_opencode() -> None:
    config = json_of("opencode")
    provider = config["provider"]["pagemill"]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": "{env:PAGEMILL_API_KEY}"}
    assert provider["models"] == {MODEL: {"name": MODEL, "limit": {"context": CONTEXT, "output": CONTEXT // 4}}}
    assert config["model"] == f"pagemill/{MODEL}"


def test_zed() -> None:
    provider = json_of("zed")["language_models"]["openai_compatible"]["pagemill"]
    assert provider["api_url"] == f"{URL}/v1"
    (model,) = provider["available_models"]
    assert (model["name"], model["max_tokens"], model["capabilities"]["tools"]) == (MODEL, CONTEXT, True)


def test_droid() -> None:
    (model,) = json_of("droid")["customModels"]
    assert model["provider"] == "generic-chat-completion-api"
    assert (model["model"], model["baseUrl"]) == (MODEL, f"{URL}/v1")
    assert (model["apiKey"], model["maxOutputTokens"]) == ("${PAGEMILL_API_KEY}", CONTEXT // 4)


def test_codex() -> None:
    """The table names no variable for the key unless a line is uncommented: Codex refuses one that is not set."""
    config = tomllib.loads(printed("codex"))
    assert (config["model"], config["model_provider"]) == (MODEL, "pagemill")
    assert config["model_context_window"] == CONTEXT
    assert config["model_providers"]["pagemill"] == {
        "name": "pagemill", "base_url": f"{URL}/v1", "wire_api": "responses",
    }  # fmt: skip
    with_key = tomllib.loads(printed("codex").replace("# env_key = ", "env_key = "))
    assert with_key["model_providers"]["pagemill"]["env_key"] == "PAGEMILL_API_KEY"


def test_continue() -> None:
    config = yaml.safe_load(printed("continue"))
    assert {"name", "version", "schema"} <= config.keys()
    (model,) = config["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", MODEL, f"{URL}/v1")
    assert model["apiKey"] == "${{ secrets.PAGEMILL_API_KEY }}"
    assert model["defaultCompletionOptions"] == {"contextLength": CONTEXT}


def test_the_llm_tool() -> None:
    (model,) = yaml.safe_load(printed("llm"))
    assert model == {
        "model_id": "pagemill", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "pagemill",
        "supports_tools": True, "supports_schema": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "address", "key", "models"),
    [
        ("openai", {"OPENAI_BASE_URL": f"{URL}/v1"}, "OPENAI_API_KEY", []),
        ("anthropic", {"ANTHROPIC_BASE_URL": URL}, "ANTHROPIC_API_KEY", []),
        (
            "claude-code",
            {"ANTHROPIC_BASE_URL": URL},
            "ANTHROPIC_AUTH_TOKEN",
            ["ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))],
        ),
        ("aider", {"OPENAI_API_BASE": f"{URL}/v1"}, "OPENAI_API_KEY", []),
        ("qwen-code", {"OPENAI_BASE_URL": f"{URL}/v1"}, "OPENAI_API_KEY", ["OPENAI_MODEL"]),
        ("goose", {"OPENAI_HOST": URL, "OPENAI_BASE_PATH": "v1/chat/completions"}, "OPENAI_API_KEY", ["GOOSE_MODEL"]),
        (
            "copilot-cli",
            {"COPILOT_PROVIDER_BASE_URL": f"{URL}/v1", "COPILOT_PROVIDER_TYPE": "openai"},
            "COPILOT_PROVIDER_API_KEY",
            ["COPILOT_MODEL"],
        ),
    ],
)
def test_variables_of_a_shell(name: str, address: dict[str, str], key: str, models: list[str]) -> None:
    set_there = variables_of(name, True)
    assert set_there.items() >= (address | {key: "sk-1"} | dict.fromkeys(models, MODEL)).items()
    assert variables_of(name, False)[key] == "none"


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
    listed = {"data": [{"id": "other", "max_model_len": 1}, {"id": MODEL, "max_model_len": CONTEXT}]}
    serving(monkeypatch, CHAT, models=listed)
    assert main(["connect", "zed", "--url", URL, "--model", MODEL]) == 0
    assert f'"max_tokens": {CONTEXT},' in capsys.readouterr().out
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
