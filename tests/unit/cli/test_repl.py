import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.cli.errors import ServerError
from pagemill.cli.repl import Repl
from pagemill.cli.session import Delta, Usage


class FakeSession:
    """Answers "Answer N."; `fail` is raised after the first piece of the next answer."""

    model = "fake-135m"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []
        self.fail: BaseException | None = None
        self.num_closed = 0

    def stream_chat(self, messages: Any, params: Any) -> Iterator[Delta]:
        self.asked.append((list(messages), dict(params)))
        try:
            yield Delta("Answer ")
            if self.fail is not None:
                error, self.fail = self.fail, None
                raise error
            yield Delta(f"{len(self.asked)}.", "stop", Usage(5, 2))
        finally:
            self.num_closed += 1

    def close(self) -> None:
        pass


class RecordingView:
    prompt = "> "

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        self.answers.append("")
        yield self._write

    def _write(self, text: str) -> None:
        self.answers[-1] += text

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


class Talk:
    """A REPL that is typed into."""

    def __init__(self, system: str | None = None, **params: Any) -> None:
        self.session, self.view = FakeSession(), RecordingView()
        self.lines: list[Any] = []
        self.repl = Repl(self.session, self.view, self._read, params, system)

    def _read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def type(self, *lines: Any) -> None:
        self.lines.extend(lines)
        assert self.repl.run() == 0


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_a_conversation_has_memory(talk: Talk):
    talk.type("One?", "", "Two?")
    assert talk.view.answers == ["Answer 1.", "Answer 2."]
    assert [message["content"] for message in talk.session.asked[1][0]] == ["One?", "Answer 1.", "Two?"]
    assert "2 tokens" in talk.view.notes[-1]


def test_exit_leaves_at_once(talk: Talk):
    talk.type("/exit", "never read")
    assert talk.lines == ["never read"]
    assert talk.session.asked == []


def test_system_prompt(talk: Talk):
    talk.type("/system Be brief.", "Hi", "/system", "/system off", "Ho")
    assert talk.session.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    assert "system prompt: Be brief." in talk.view.notes
    assert talk.session.asked[1][0][0]["role"] == "user"


def test_reset_forgets_the_turns_and_keeps_the_rest():
    talk = Talk(system="Be brief.", temperature=0.5)
    talk.type("One?", "/reset", "Two?")
    assert [message["content"] for message in talk.session.asked[1][0]] == ["Be brief.", "Two?"]
    assert talk.session.asked[1][1] == {"temperature": 0.5}


def test_parameters_are_set_shown_and_unset(talk: Talk):
    talk.type("/set temperature 0.7", "/set max_tokens 12", '/set stop ["a", "b"]', "/params", "Hi")
    assert talk.session.asked[0][1] == {"temperature": 0.7, "max_tokens": 12, "stop": ["a", "b"]}
    assert any("temperature = 0.7" in note and "top_k = default" in note for note in talk.view.notes)
    talk.type("/set temperature default", "/set stop [END", "Hi")
    assert talk.session.asked[1][1] == {"max_tokens": 12, "stop": ["[END"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature='hot' is not a number"),
        ("/set max_tokens 1.5", "max_tokens='1.5' is not an integer"),
        ("/set top_p 3", "top_p=3.0 is not allowed"),
        ("/set heat 3", "unknown parameter 'heat'; known: max_tokens, temperature"),
        ("/set temperature", "/set takes a name and a value"),
        ("/save", "/save takes a file name"),
        ("/nonsense", "unknown command /nonsense; /help lists them"),
        ("broken \udcff", "the message is not valid UTF-8"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(talk: Talk, line: str, message: str):
    talk.type(line)
    assert len(talk.view.errors) == 1 and talk.view.errors[0].startswith(message)
    assert talk.session.asked == [] and talk.repl.params == {} and talk.repl.turns == []


def test_help_names_every_command(talk: Talk):
    talk.type("/help")
    assert all(name in talk.view.notes[-1] for name in [*talk.repl._commands.keys() - {"/help"}, "/exit"])


def test_two_slashes_send_one(talk: Talk):
    talk.type("//etc is a folder?")
    assert talk.session.asked[0][0][0]["content"] == "/etc is a folder?"


def test_ctrl_c_stops_the_answer_and_keeps_it(talk: Talk):
    talk.session.fail = KeyboardInterrupt()
    talk.type("One?", "Two?")
    assert talk.view.notes[1].startswith("stopped, 1 token")
    assert [message["content"] for message in talk.session.asked[1][0]] == ["One?", "Answer ", "Two?"]
    assert talk.session.num_closed == 2


def test_ctrl_c_at_the_prompt_does_not_leave(talk: Talk):
    talk.type(KeyboardInterrupt(), "One?")
    assert talk.view.answers == ["Answer 1."]
    assert any("Ctrl-D" in note for note in talk.view.notes)


def test_an_error_forgets_the_question(talk: Talk):
    talk.session.fail = ServerError("the server failed: out of memory")
    talk.type("One?", "Two?")
    assert talk.view.errors == ["the server failed: out of memory"]
    assert [message["content"] for message in talk.session.asked[1][0]] == ["Two?"]


def test_save(talk: Talk, tmp_path: Path):
    talk.type("/set seed 3", "/system S", "One?", f"/save {tmp_path}/a.json", f"/save {tmp_path}/a.md")
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["model"] == "fake-135m" and saved["params"] == {"seed": 3}
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert "**user**\n\nOne?\n" in (tmp_path / "a.md").read_text()
    talk.type(f"/save {tmp_path}/a.md", f"/save {tmp_path}/no/such.md")
    assert "exists already" in talk.view.errors[0]
    assert "No such file or directory" in talk.view.errors[1]
