"""`MessageParsers`: the parsers that a server was started with, and those that one message needs."""

from collections.abc import Sequence

import msgspec

from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.config.sections import ServerConfig
from pagemill.errors import ConfigError
from pagemill.serve.parsers.interface import Delta, MessageForm, MessageParser, MessageParserType, merged


class ParserSettings(msgspec.Struct, frozen=True):
    """Which parsers there are; plain data, for other processes too."""

    reasoning: str | None = None
    """Name of the reasoning parser."""
    tool_calls: str | None = None
    """Name of the parser of tool calls; None: no tools can be called."""
    hide_unused_tools: bool = False
    """Whether the template gets no tools where tool_choice is "none"."""

    @classmethod
    def of(cls, config: ServerConfig) -> "ParserSettings":
        """Raises ConfigError for a parser that is not in the catalogue, and for flags that need another one."""
        if config.reasoning_parser is not None:
            REASONING_PARSERS.check(config.reasoning_parser)
        if config.tool_call_parser is not None:
            TOOL_PARSERS.check(config.tool_call_parser)
        if config.enable_auto_tool_choice and config.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs --tool-call-parser, the format in which the model writes calls; "
                f"known: {', '.join(sorted(TOOL_PARSERS))}"
            )
        return cls(
            config.reasoning_parser,
            config.tool_call_parser if config.enable_auto_tool_choice else None,
            config.exclude_tools_when_tool_choice_none,
        )

    @property
    def markers(self) -> frozenset[str]:
        """The texts that the parsers look for."""
        kinds = _kinds(self.reasoning, self.tool_calls)
        return frozenset(marker for kind in kinds for marker in kind.markers)


class MessageParsers:
    """Makes the parser of a message."""

    def __init__(self, settings: ParserSettings) -> None:
        self._settings = settings

    def make(self, form: MessageForm | None) -> MessageParser | None:
        """None when the whole text is content."""
        if form is None:
            return None
        kinds = _kinds(self._settings.reasoning, self._settings.tool_calls if form.tools else None)
        parsers = [kind(form) for kind in kinds]
        return ParserChain(parsers, form.include_reasoning) if parsers else None


class ParserChain:
    """Implements `MessageParser` by several: what is content for one is what the next looks at."""

    def __init__(self, parsers: Sequence[MessageParser], include_reasoning: bool = True) -> None:
        self._parsers = parsers
        self._include_reasoning = include_reasoning

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """See `MessageParser`."""
        first, *others = self._parsers
        return self._shown(self._through(first.feed(text, token_ids), others))

    def finish(self) -> list[Delta]:
        """See `MessageParser`."""
        deltas: list[Delta] = []
        for number, parser in enumerate(self._parsers):
            deltas += self._through(parser.finish(), self._parsers[number + 1 :])
        return self._shown(deltas)

    def _through(self, deltas: list[Delta], others: Sequence[MessageParser]) -> list[Delta]:
        for parser in others:
            found: list[Delta] = []
            for delta in deltas:
                found += parser.feed(delta.content, ()) if delta.content else [delta]
            deltas = found
        return deltas

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        if not self._include_reasoning:
            deltas = [delta for delta in deltas if not delta.reasoning]
        return merged(deltas)


def _kinds(reasoning: str | None, tool_calls: str | None) -> list[MessageParserType]:
    """The classes of two names, each once, in the order in which they look at the text."""
    kinds: list[MessageParserType] = []
    if reasoning is not None:
        kinds.append(REASONING_PARSERS.resolve(reasoning))
    if tool_calls is not None:
        kinds.append(TOOL_PARSERS.resolve(tool_calls))
    return list(dict.fromkeys(kinds))
