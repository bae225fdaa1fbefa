"""The loop of a chat: reads lines, runs slash commands, streams answers. Knows no terminal and no network."""

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from pagemill.cli.answer_timer import AnswerTimer
from pagemill.cli.sampling_flags import param_names, parse_param
from pagemill.cli.session import Delta, Message, Session, checked_text
from pagemill.cli.views import View
from pagemill.errors import PagemillError, RequestError

UNSET = "default"

HELP = f"""\
/reset            forget the conversation; the system prompt and the parameters stay
/system TEXT      set the system prompt; '/system off' removes it, '/system' shows it
/params           show the sampling parameters
/set NAME VALUE   set one of {", ".join(param_names())}; the value '{UNSET}' unsets it
/save FILE        write the conversation: JSON for FILE.json, otherwise Markdown
/exit             leave, as does Ctrl-D
Ctrl-C stops an answer. A line that begins with // is sent with one slash."""


class Repl:
    """One conversation. `read_line(prompt)` returns what the user typed; EOFError from it ends the loop."""

    def __init__(
        self,
        session: Session,
        view: View,
        read_line: Callable[[str], str],
        params: Mapping[str, Any],
        system: str | None = None,
    ) -> None:
        self.turns: list[Message] = []
        self.system = system
        self.params = dict(params)
        self._session = session
        self._view = view
        self._read_line = read_line
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._set_system,
            "/params": self._show_params,
            "/set": self._set_param,
            "/save": self._save,
        }

    def run(self) -> int:
        """Talk until the user leaves; 0."""
        self._view.note(f"{self._session.model} - /help lists the commands, /exit leaves")
        while True:
            try:
                line = self._read_line(self._view.prompt).strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._view.note("\n/exit or Ctrl-D leaves")
                continue
            if line in ("/exit", "/quit"):
                return 0
            try:
                self._execute(line)
            except PagemillError as error:
                self._view.error(str(error))

    def messages(self) -> list[Message]:
        """The conversation as it is sent: the system prompt, then the turns."""
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def _execute(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/") or line.startswith("//"):
            self._ask(checked_text(line[1:] if line.startswith("//") else line, "the message"))
            return
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            raise RequestError(f"unknown command {name}; /help lists them", "command")
        self._commands[name](rest.strip())

    def _ask(self, question: str) -> None:
        """Stream one answer. It stays in the conversation, also when it was stopped; after an error nothing does."""
        self.turns.append({"role": "user", "content": question})
        timer = AnswerTimer()
        pieces = []
        stopped = False
        try:
            with self._view.answer() as write, contextlib.closing(self._stream()) as deltas:
                for delta in deltas:
                    timer.saw(delta)
                    pieces.append(delta.text)
                    write(delta.text)
        except KeyboardInterrupt:
            stopped = True
        except PagemillError:
            self.turns.pop()
            raise
        if answer := "".join(pieces):
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()
        self._view.note(("stopped, " if stopped else "") + timer.summary())

    def _stream(self) -> Generator[Delta, None, None]:
        return self._session.stream_chat(self.messages(), self.params)

    def _help(self, rest: str) -> None:
        self._view.note(HELP)

    def _reset(self, rest: str) -> None:
        self.turns.clear()
        self._view.note("the conversation is empty")

    def _set_system(self, rest: str) -> None:
        if rest:
            self.system = None if rest == "off" else checked_text(rest, "the system prompt")
        self._view.note(f"system prompt: {self.system or 'none'}")

    def _show_params(self, rest: str) -> None:
        self._view.note("\n".join(f"{name} = {self.params.get(name, UNSET)}" for name in param_names()))

    def _set_param(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        if not text.strip():
            raise RequestError("/set takes a name and a value, such as: /set temperature 0.7", "command")
        if text.strip() == UNSET and name in param_names():
            self.params.pop(name, None)
        else:
            self.params[name] = parse_param(name, text.strip())
        self._view.note(f"{name} = {self.params.get(name, UNSET)}")

    def _save(self, rest: str) -> None:
        if not rest:
            raise RequestError("/save takes a file name, such as: /save talk.md", "command")
        path = Path(rest).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self._as_json() if path.suffix == ".json" else self._as_markdown())
        except FileExistsError:
            raise RequestError(f"{path} exists already; choose another name", "command") from None
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}", "command") from None
        self._view.note(f"saved to {path}")

    def _as_json(self) -> str:
        talk = {"model": self._session.model, "params": self.params, "messages": self.messages()}
        return json.dumps(talk, indent=2, ensure_ascii=False) + "\n"

    def _as_markdown(self) -> str:
        return "\n".join(f"**{turn['role']}**\n\n{turn['content']}\n" for turn in self.messages())
