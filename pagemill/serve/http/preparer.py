"""`Preparer`: the bytes of a body become requests that can run, and what their answer shall look like.
Does not know in which process it works: on the event loop of the server it is asked part by part, in a helper process
at once."""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from pagemill.errors import RequestError
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.http.connection import parse_body
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.preparation import Preparation
from pagemill.serve.processing.input_processor import RequestOptions
from pagemill.tokenizers.control_text import unmarked

CHAT, COMPLETIONS, EMBEDDINGS = "chat", "completions", "embeddings"
NO_PARSERS = ParserSettings()


class AnswerForm(msgspec.Struct, frozen=True, tag="form"):
    """What the answer to a body shall look like."""

    stream: bool = False
    with_usage: bool = False
    num_per_prompt: int = 1
    """Completions of each prompt."""
    as_base64: bool = False
    message: MessageForm | None = None
    """For the parsers of the answer's messages; None: the whole text is content."""
    ignored_fields: str = ""
    """Names of fields of the body that have no effect: nobody knows them, or the chat template does not read them."""

    def headers(self) -> dict[str, str]:
        """What the answer says of the body, beside its own."""
        return {IGNORED_FIELDS_HEADER: self.ignored_fields} if self.ignored_fields else {}


class PreparedPrompt(msgspec.Struct, frozen=True, tag="prompt"):
    """One prompt of a body, ready to run."""

    request: EngineCoreRequest
    echo: str = ""
    """What its texts begin with."""


Part = AnswerForm | PreparedPrompt
"""What becomes of a body: first the form of the answer, then its prompts in order."""


class Preparer:
    """Parses, renders, tokenizes and checks; one method per kind of body."""

    def __init__(self, preparation: Preparation, model: ServedModel, parsers: ParserSettings = NO_PARSERS) -> None:
        self._preparation = preparation
        self._model = model
        self._parsers = parsers
        hides = preparation.tokenizer.hides
        self._hides_markers = any(hides(marker) for marker in parsers.markers)
        """Whether what parsers look for are special tokens, which texts leave out unless they are to be shown."""
        self._kinds: Mapping[str, Callable[[bytes], Iterator[Part]]] = {
            CHAT: self._chat,
            COMPLETIONS: self._completions,
            EMBEDDINGS: self._embeddings,
        }

    def parts(self, kind: str, raw: bytes) -> Iterator[Part]:
        """The parts of a body, each made when it is asked for. Raises RequestError, before or between them."""
        return self._kinds[kind](raw)

    def _chat(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, ChatBody)
        self._model.check(body.model)
        params = body.to_sampling_params(self._preparation.default_params)
        self._check_total(1, params.n, params.max_tokens)
        self._check_parsers(body)
        chat_options = body.to_chat_options(self._parsers.hide_unused_tools)
        body.leave_unread(self._preparation.chats.unread_variables(chat_options))
        prompt = self._preparation.chats.render(body.messages, chat_options)
        message = None
        if self._parsers.reasoning is not None or body.calls_tools:
            message = body.message_form(unmarked(prompt))
            if self._hides_markers:
                params = params.replace(skip_special_tokens=False)
        yield msgspec.structs.replace(_form_of(body, params), message=message)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=bool(body.add_special_tokens),
            rendered=True,
        )
        prepared = self._prepared(prompt, params, options)
        yield msgspec.structs.replace(prepared, echo=body.echoed)

    def _check_parsers(self, body: ChatBody) -> None:
        """Raises RequestError when the answer needs a parser that the server was not started with."""
        if body.calls_tools and self._parsers.tool_calls is None:
            raise RequestError(
                "tools can be called where the server was started with --enable-auto-tool-choice and "
                "--tool-call-parser, which this one was not; send tool_choice 'none', or no tools",
                "tools",
            )
        if body.include_reasoning is False and self._parsers.reasoning is None:
            raise RequestError(
                "include_reasoning=false needs a server that was started with --reasoning-parser: this one does not "
                "tell reasoning from content",
                "include_reasoning",
            )

    def _completions(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, CompletionBody)
        self._model.check(body.model)
        params = body.to_sampling_params(self._preparation.default_params)
        self._check_total(len(body.prompt), params.n, body.max_tokens)
        yield _form_of(body, params)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens is not False,
            clamp_max_tokens=body.max_tokens is None,
        )
        for prompt in body.prompt:
            yield self._prepared(prompt, params, options, bool(body.echo))

    def _embeddings(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, EmbeddingBody)
        self._model.check(body.model)
        params = body.to_pooling_params()
        yield AnswerForm(as_base64=body.encoding_format == "base64", ignored_fields=body.ignored_fields)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens is not False,
        )
        for prompt in body.input:
            yield PreparedPrompt(self._preparation.inputs.prepare(prompt, params, options).request)

    def _check_total(self, num_prompts: int, n: int, max_tokens: int | None) -> None:
        """Raises RequestError when the completions of one body may get more tokens than the deployment takes from one
        call. What the client did not ask for in so many words does not count; a single completion has the context as
        its limit."""
        num_completions, most = num_prompts * n, self._preparation.max_call_tokens
        if max_tokens is None or most is None or num_completions == 1 or num_completions * max_tokens <= most:
            return
        raise RequestError(
            f"{num_prompts} prompts x n={n} x max_tokens={max_tokens} are {num_completions * max_tokens} tokens in one "
            f"request; at most {most} are allowed (the KV cache, as often as --max-num-queued-reqs fills it after "
            "--max-num-seqs): lower max_tokens or n, or send several requests",
            "max_tokens",
        )

    def _prepared(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, echo: bool = False
    ) -> PreparedPrompt:
        prepared = self._preparation.inputs.prepare(prompt, params, options)
        if not echo:
            return PreparedPrompt(prepared.request)
        text = prepared.prompt
        if text is None:
            text = self._preparation.tokenizer.decode(prepared.request.prompt_token_ids)
        return PreparedPrompt(prepared.request, text)


def _form_of(body: ChatBody | CompletionBody, params: SamplingParams) -> AnswerForm:
    return AnswerForm(bool(body.stream), body.wants_usage, params.n, ignored_fields=body.ignored_fields)
