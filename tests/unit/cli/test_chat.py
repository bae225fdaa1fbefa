import io
import sys

import pytest

from pagemill.cli.main import main
from tests.fakes.openai_server import FakeOpenAIServer
from tests.unit.cli.conftest import FakeLaunch


def test_one_question(launch: FakeLaunch, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--model", "m", "-q", "Hi", "--system", "S", "--temperature", "0"]) == 0
    assert capsys.readouterr() == ("one two three\n", "")
    prompt, params = launch.llm.requests[0]
    assert "".join(map(chr, prompt["prompt_token_ids"])) == "<system>S<user>Hi"
    assert params.temperature == 0.0 and params.max_tokens is None


def test_one_question_to_a_server(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", server.url, "-q", "Hi"]) == 0
    assert capsys.readouterr().out == "The **ocean** is wide.\n"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    server.script.break_after = 1
    assert main(["chat", "--url", server.url, "-q", "Hi"]) == 1
    assert capsys.readouterr().err == "pagemill: error: the server failed: the engine died\n"


@pytest.mark.slow
def test_a_conversation_from_a_pipe(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\n/set top_k 3\n/bad\nTwo?\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr() == (
        "The **ocean** is wide.\nThe **ocean** is wide.\n",
        "error: unknown command /bad; /help lists them\n",
    )
    assert len(server.bodies[1]["messages"]) == 3
    assert server.bodies[1]["top_k"] == 3


def test_an_empty_question_is_refused(launch: FakeLaunch, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--model", "m", "-q", ""]) == 1
    assert "--question is empty" in capsys.readouterr().err
