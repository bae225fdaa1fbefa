"""Chat templates: messages to text with sandboxed Jinja, bounded in time and size.
Knows nothing about tokens, and nothing about where a template came from.

The bounds stop mistakes and simple abuse; a template of unknown origin needs a process of its own.
"""

import datetime
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemill.errors import RequestError
from pagemill.tokenizers.chat_content import PARTS, STRING, ContentForm, convert, text_of

MAX_OUTPUT_CHARS: Final = 4 << 20
MAX_SOURCE_CHARS: Final = 256 << 10
MAX_SECONDS: Final = 5.0
RESERVED_VARIABLES: Final = frozenset({"messages", "add_generation_prompt", "continue_final_message", "chat_template"})
"""Names that a request's own template variables may not have."""

_TICK: Final = "pagemill_tick"
_END_OF_MESSAGE: Final = "<|pagemill:end-of-final-message|>"
_PROBE: Final = "pagemill-probe"
_PROBE_VARIABLES: Final = {
    "bos_token": "", "eos_token": "", "unk_token": "", "pad_token": "",
    "tools": None, "documents": None, "add_generation_prompt": False,
}  # fmt: skip


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Messages as one text. With continue_final_message it ends where the last message's content ends.

    Raises RequestError when the template is malformed, refuses the messages, or takes too long or too much.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=true needs add_generation_prompt=false: the last message is already begun",
            "continue_final_message",
        )
    template = _compile(source)
    chat = convert(messages, _content_form(source))
    if continue_final_message:
        chat = _with_end_mark(chat)
    context = {"tools": None, "documents": None, **(variables or {}), "messages": chat}
    text = _run(template, {**context, "add_generation_prompt": add_generation_prompt})
    return _up_to_end_mark(text) if continue_final_message else text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a check of the clock in every loop and macro, and no giant strings from `*` and `**`."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in found:
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        plain = all(isinstance(value, (int, float)) and abs(value) < 2**31 for value in (left, right))
        repeated = max((len(value) for value in (left, right) if isinstance(value, (str, list, tuple))), default=0)
        count = max((value for value in (left, right) if isinstance(value, int)), default=0)
        if (operator == "**" and (not plain or abs(right) > 64)) or repeated * count > MAX_OUTPUT_CHARS:
            raise jinja2.exceptions.SecurityError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed", "chat_template"
        )
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is malformed: line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, OverflowError, SyntaxError) as error:
        raise RequestError(f"the chat template cannot be compiled: {error}") from error


def _run(template: jinja2.Template, context: dict[str, Any]) -> str:
    deadline = time.monotonic() + MAX_SECONDS

    def tick() -> None:
        if time.monotonic() > deadline:
            raise jinja2.exceptions.SecurityError(f"it runs for more than {MAX_SECONDS:g} s")

    pieces, num_chars = [], 0
    try:
        for piece in template.generate({**context, _TICK: tick}):
            tick()
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise jinja2.exceptions.SecurityError(f"its output exceeds {MAX_OUTPUT_CHARS} characters")
    except Exception as error:  # a template runs arbitrary expressions on the request's data: any type may come out
        raise RequestError(f"the chat template refuses the messages: {error}", "messages") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _content_form(source: str) -> ContentForm:
    """How the template takes `content`, found by giving it both forms and looking for the text in the output."""
    parts = [{"type": "text", "text": _PROBE}]
    if _shows(source, parts):
        return PARTS if not _shows(source, _PROBE) else ContentForm.EITHER
    return STRING


def _shows(source: str, content: Any) -> bool:
    chat = [{"role": "user", "content": content}]
    try:
        text = _run(_compile(source), {**_PROBE_VARIABLES, "messages": chat})
    except RequestError:
        return False
    # A list that was merely printed shows the text in quotes.
    return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _with_end_mark(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        marked: Any = content + _END_OF_MESSAGE
    elif isinstance(content, list) and content and text_of(content[-1]) is not None:
        marked = [*content[:-1], {**content[-1], "text": f"{text_of(content[-1])}{_END_OF_MESSAGE}"}]
    else:
        raise RequestError("continue_final_message=true needs a last message that ends with text", "messages")
    return [*chat[:-1], {**chat[-1], "content": marked}]


def _up_to_end_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_OF_MESSAGE)
    if not mark:
        raise RequestError(
            "continue_final_message=true is not possible: the chat template does not show the last message's text",
            "continue_final_message",
        )
    return before
