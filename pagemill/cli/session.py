"""`Session`: one way to talk to a model, whether it runs in this process or behind a URL.

Knows which of the two the flags ask for; knows nothing about terminals.
"""

import argparse
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill import envs
from pagemill.cli.engine_flags import add_engine_flags, given_settings
from pagemill.cli.errors import UsageError
from pagemill.cli.sampling_flags import Params
from pagemill.config.arguments import EngineArgs
from pagemill.errors import RequestError
from pagemill.utils.gc_pause import gc_paused

DEFAULT_URL = "http://127.0.0.1:8000"
SAMPLING_NOT_ENGINE = ("seed",)
"""Engine settings whose flag means a request's sampling parameter here."""

Message = Mapping[str, str]
"""{"role": system, user or assistant, "content": text}"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: new text, and on the last pieces why it ended and what it cost."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class Session(Protocol):
    """A model that answers. One answer at a time; closing an unfinished generator aborts its request."""

    model: str
    """Name to show."""

    def stream_chat(self, messages: Sequence[Message], params: Params) -> Generator[Delta, None, None]:
        """The assistant's next message. Raises PagemillError."""

    def stream_completion(self, prompt: str, params: Params) -> Generator[Delta, None, None]:
        """What follows the prompt. Raises PagemillError."""

    def close(self) -> None:
        """Release the connection or the engine."""


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say where the model runs, and the engine's flags for when it is here."""
    group = parser.add_argument_group("server", "Without --model, a running server answers.")
    group.add_argument("--url", help=f"where the server is; --model is then its model's name (default: {DEFAULT_URL})")
    group.add_argument("--api-key", help="key that the server asks for (default: PAGEMILL_API_KEY)")
    add_engine_flags(parser, skip=SAMPLING_NOT_ENGINE)


def open_session(args: argparse.Namespace) -> Session:
    """The session that the flags ask for. Raises UsageError for flags of the one given with the other.

    `--url` decides; without it, `--model` runs in this process, and with neither the server at DEFAULT_URL is asked.
    """
    if args.model is not None and args.url is None:
        if args.api_key is not None:
            raise UsageError("--api-key is for a server: give --url too, or leave it out")
        return _open_inproc(args)
    settings = [name for name in given_settings(args, skip=SAMPLING_NOT_ENGINE) if name != "model"]
    if settings:
        flag = settings[0].replace("_", "-")
        raise UsageError(f"--{flag} is for a model in this process: give --model (and no --url), or leave it out")
    from pagemill.cli.session_http import HttpSession  # deferred: httpx

    return HttpSession(args.url or DEFAULT_URL, model=args.model, api_key=args.api_key or envs.api_key())


def checked_text(text: str, what: str) -> str:
    """The text, if it is one: arguments and files may hold bytes that are not UTF-8. Raises RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} is not valid UTF-8", what) from None
    if not text:
        raise RequestError(f"{what} is empty", what)
    return text


def _open_inproc(args: argparse.Namespace) -> Session:
    with gc_paused():
        from pagemill.cli.session_inproc import InprocSession  # deferred: numpy
        from pagemill.launch import build_inproc  # deferred: the whole engine

        # Lines of figures would come between those of the conversation.
        settings = {"disable_log_stats": True} | given_settings(args, skip=SAMPLING_NOT_ENGINE)
        return InprocSession(build_inproc(EngineArgs(**settings)).llm, args.model)
