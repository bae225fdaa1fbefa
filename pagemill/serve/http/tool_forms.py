"""`ToolForms`: what the answer to a chat is held to because of its tools, and how much is thought before it. Does not
know what follows a form."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from pagemill.config.choices import StrictLevel
from pagemill.errors import RequestError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.structured_outputs import StructuredOutputsParams, Thinking
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.parsers.call_spec import Function, Marks, Spec, either
from pagemill.serve.parsers.call_writer import CallWriter, ChannelWriter
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.parsers.format import Channels
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.parsers.opening import Opening, opening_of
from pagemill.serve.processing.input_processor import InputProcessor, RequestOptions, WatchedOutput
from pagemill.serve.processing.tool_choice import REQUIRED
from pagemill.tokenizers.interface import Tokenizer

MAX_HELD: Final = 256
"""Functions that calls are held to where the model decides to make them; of more, calls are read as they come."""


class ToolForms:
    """For the chats of one server."""

    def __init__(self, parsers: ParserSettings, inputs: InputProcessor, tokenizer: Tokenizer) -> None:
        self._parsers = parsers
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._writers = {forced: self._writer(forced) for forced in (True, False)}

    def hold(
        self, body: ChatBody, message: MessageForm | None, params: SamplingParams, options: RequestOptions
    ) -> tuple[SamplingParams, RequestOptions]:
        """The parameters and options of the request, with what its tools and its budget demand. Raises RequestError,
        and TakesTimeError where `options` say so."""
        if message is None:
            return params, options
        thinking = self._thinking(message, body.thinking_token_budget)
        if body.thinking_token_budget is not None:
            options = dataclasses.replace(options, watched=WatchedOutput(thinking))
        if not body.calls_tools:
            return params, options
        forced = body.choice.mode == REQUIRED
        writer = self._writers[forced]
        if writer is None or (not forced and not self._is_held(body, params)):
            return params, options
        functions = self._functions(body, writer, forced)
        if not functions:
            return params, options
        parts = tuple((one.field, self._source(one, options.hurried)) for one in functions if one.schema is not None)
        several = message.parallel_tool_calls
        if forced:
            return self._forced(params, options, writer.whole(functions, several), parts)
        return self._chosen(params, options, writer, functions, several, thinking, parts)

    def _writer(self, forced: bool) -> CallWriter | ChannelWriter | None:
        given = self._parsers.calls_format(forced)
        if given is None:
            return None
        return ChannelWriter(given, self._control) if isinstance(given, Channels) else CallWriter(given, self._control)

    def _is_held(self, body: ChatBody, params: SamplingParams) -> bool:
        """Whether calls are held to anything that the model decides to make. Raises RequestError where they must and
        cannot be."""
        level = self._parsers.strict_level
        strict = [name for name, tool in _tools_of(body).items() if tool["function"].get("strict")]
        if strict and level is StrictLevel.OFF:
            raise RequestError(
                f"strict=true of {strict[0]} cannot be kept: the server was started with --tool-strict-level off",
                "tools",
            )
        must = bool(strict) or (body.choice.names is not None and level is not StrictLevel.OFF)
        free = params.ignore_eos or params.allowed_token_ids or body.use_beam_search
        if not must and (free or level in (StrictLevel.OFF, StrictLevel.STRICT_FUNCTIONS)):
            return False
        return must or len(_tools_of(body)) <= MAX_HELD

    def _functions(self, body: ChatBody, writer: CallWriter | ChannelWriter, forced: bool) -> list[Function]:
        """Those that may be called. Raises RequestError for one that must be held to its schema and cannot be."""
        everything = forced or self._parsers.strict_level is StrictLevel.ALL
        found = []
        for name, tool in _tools_of(body).items():
            function, field = tool["function"], f"tools.{body.tools.index(tool)}.function"
            strict = bool(function.get("strict"))
            if not writer.can_name(name):
                if forced or strict:
                    raise RequestError(
                        f"{field}.name={name!r:.80} cannot be written in the model's format of calls", f"{field}.name"
                    )
                continue
            schema = (function.get("parameters") or {}) if everything or strict else None
            found.append(Function(name, schema, f"{field}.parameters", strict))
        return found

    def _source(self, function: Function, hurried: bool) -> str:
        """The grammar of the arguments alone. Raises RequestError that names the field."""
        schema = function.schema or {}
        kind = schema.get("type", "object")
        if kind != "object":
            raise RequestError(f"{function.field} is of type {kind!r:.60}: arguments are an object", function.field)
        try:
            form = StructuredOutputsParams(json={"type": "object", **schema})
            return self._inputs.source_of(form, hurried)
        except RequestError as error:
            raise RequestError(f"{function.field}: {error}", function.field) from None

    def _forced(
        self, params: SamplingParams, options: RequestOptions, form: Spec, parts: tuple[tuple[str, str], ...]
    ) -> tuple[SamplingParams, RequestOptions]:
        watched = options.watched or WatchedOutput()
        options = dataclasses.replace(options, watched=WatchedOutput(watched.thinking, parts=parts), form_field="tools")
        if isinstance(self._writers[True], ChannelWriter):
            options = dataclasses.replace(options, reasoning=None)
        return params.replace(structured_outputs=_tag(form)), options

    def _chosen(
        self,
        params: SamplingParams,
        options: RequestOptions,
        writer: CallWriter | ChannelWriter,
        functions: list[Function],
        several: bool,
        thinking: Thinking | None,
        parts: tuple[tuple[str, str], ...],
    ) -> tuple[SamplingParams, RequestOptions]:
        """Calls that the model decides to make."""
        answer = params.structured_outputs
        if answer is not None:
            spec = _spec_of(answer)
            if spec is None or isinstance(writer, ChannelWriter):
                return params, options
            form = _tag(either([spec, writer.whole(functions, several)]), answer)
            watched = options.watched or WatchedOutput()
            options = dataclasses.replace(
                options, watched=WatchedOutput(watched.thinking, parts=parts), form_field="tools"
            )
            return params.replace(structured_outputs=form), options
        found = writer.triggered(functions, several)
        form = _tag(found.form)
        if not parts:
            try:
                self._inputs.source_of(form, options.hurried)
            except RequestError:
                return params, options  # nobody asked for it
        watched = WatchedOutput(thinking, found.triggers, found.first_triggers, parts)
        return params.replace(structured_outputs=form), dataclasses.replace(
            options, watched=watched, reasoning=None, form_field="tools"
        )

    def _thinking(self, message: MessageForm, budget: int | None) -> Thinking | None:
        """Where the answer reasons; None: nowhere that is known of."""
        reasoning = self._parsers.reasoning_format
        if reasoning is None:
            return None
        if isinstance(reasoning, Channels):
            begin, end = reasoning.thought, reasoning.ends[0]
            is_open, again = message.prompt_end.rstrip().endswith(begin), True
            texts = reasoning.tokens
        else:
            begin, end, texts = reasoning.begin.strip(), reasoning.end, (reasoning.begin, reasoning.end)
            opening = opening_of(reasoning, message)
            is_open, again = opening is Opening.REASONING or (opening is Opening.EITHER and reasoning.unasked), False
            if opening is Opening.CONTENT:
                return None
        marks = Marks([*texts, *reasoning.tokens], self._control)
        ids = tuple(self._tokenizer.encode(end, add_special_tokens=False, rendered=True))
        return Thinking(marks.trigger(begin), marks.trigger(end), ids, is_open, again, budget)

    def _control(self, text: str) -> int | None:
        """The id of the control token of this name; None: there is none."""
        if not self._tokenizer.hides(text):
            return None
        ids = self._tokenizer.encode(text, add_special_tokens=False, rendered=True)
        return ids[0] if len(ids) == 1 else None


@contextlib.contextmanager
def naming_tools(body: ChatBody) -> Iterator[None]:
    """In errors: where calls are held to a form, that form is made of the tools."""
    try:
        yield
    except RequestError as error:
        if error.field != "structural_tag" or not body.calls_tools:
            raise
        raise RequestError(f"tools cannot be held to their schemas: {error}", "tools") from error


def _tools_of(body: ChatBody) -> dict[str, Any]:
    """Name -> tool, of those that may be called."""
    names = body.choice.names
    tools = {tool["function"]["name"]: tool for tool in body.tools}
    return {name: tool for name, tool in tools.items() if names is None or name in names}


def _tag(form: Spec, answer: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """A form as a structural tag; JSON in it is written as the form of the answer says."""
    tag = {"format": form}
    if answer is None:
        return StructuredOutputsParams(structural_tag=tag)
    return msgspec.structs.replace(answer, **{answer.kind: None, "structural_tag": tag})


def _spec_of(answer: StructuredOutputsParams) -> Spec | None:
    """The form of an answer as a part of a structural tag; None: it is none that can be one."""
    match answer.kind:
        case "json":
            schema = msgspec.json.decode(answer.json) if isinstance(answer.json, str) else answer.json
            return {"type": "json_schema", "json_schema": schema}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": answer.regex}
        case "choice":
            return either([{"type": "const_string", "value": text} for text in answer.choice or ()])
        case "grammar":
            return {"type": "grammar", "grammar": answer.grammar}
        case _:
            return None
