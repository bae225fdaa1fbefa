"""`Preparer`: the bytes of a body become requests that can run, and what their answer shall look like.
Does not know in which process it works: on the event loop of the server it is asked part by part, in a helper process
at once."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from pagemill.errors import RequestError
from pagemill.messages.beam_search import BeamSearchParams
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.beam_search import first_params
from pagemill.serve.http.connection import parse_body
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.http.schemas.anthropic import CountTokensBody, MessagesBody
from pagemill.serve.http.schemas.batch_chat import BatchChatBody
from pagemill.serve.http.schemas.chat import ChatBody, naming_top_logprobs
from pagemill.serve.http.schemas.cohere import CohereEmbedBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import ClassifyBody, EmbeddingBody, InputBody, PoolingBody
from pagemill.serve.http.schemas.forms import naming_form
from pagemill.serve.http.schemas.generate import GenerateBody
from pagemill.serve.http.schemas.generation import GenerationBody
from pagemill.serve.http.schemas.infill import InfillBody, InfillForm
from pagemill.serve.http.schemas.ollama import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody
from pagemill.serve.http.schemas.responses import Continued, ResponseForm, ResponsesBody
from pagemill.serve.http.schemas.scores import RerankBody, ScoreBody
from pagemill.serve.http.schemas.support import IGNORED_FIELDS_HEADER
from pagemill.serve.http.schemas.tokenize import DetokenizeBody, TokenizeBody
from pagemill.serve.http.schemas.translation import Translation
from pagemill.serve.http.token_details import TokenDetails
from pagemill.serve.http.tool_forms import ToolForms, naming_tools
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.preparation import Preparation
from pagemill.serve.processing.checks import check_answer_logprobs, num_answer_logprobs
from pagemill.serve.processing.fill_in import Gap, GapPrompt
from pagemill.serve.processing.input_processor import RequestOptions
from pagemill.serve.processing.tool_choice import REQUIRED
from pagemill.tokenizers.control_text import unmarked

CHAT = "chat"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"
POOLING = "pooling"
CLASSIFY = "classify"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
SCORE = "score"
RERANK = "rerank"
COHERE_EMBED = "cohere embed"
MESSAGES = "messages"
COUNT_TOKENS = "count_tokens"
BATCH_CHAT = "batch chat"
GENERATE = "generate"
INFILL = "infill"
RESPONSES = "responses"
CONTINUED_RESPONSES = "continued responses"
OLLAMA_CHAT = "ollama chat"
OLLAMA_GENERATE = "ollama generate"
OLLAMA_EMBED = "ollama embed"
OLLAMA_EMBEDDINGS = "ollama embeddings"
TRANSLATIONS: Final[Mapping[str, type[Translation]]] = {
    MESSAGES: MessagesBody,
    OLLAMA_CHAT: OllamaChatBody,
    OLLAMA_GENERATE: OllamaGenerateBody,
    OLLAMA_EMBED: OllamaEmbedBody,
    OLLAMA_EMBEDDINGS: OllamaEmbeddingsBody,
    COHERE_EMBED: CohereEmbedBody,
}
"""Kinds of bodies that stand for one of the first three."""
NO_PARSERS = ParserSettings()
MAX_FORM_BYTES = 32 << 20
"""Characters of the forms of all completions of one body: each goes to the engine with its own."""


class AnswerForm(msgspec.Struct, frozen=True, tag="form"):
    """What the answer to a body shall look like."""

    stream: bool = False
    with_usage: bool = False
    with_running_usage: bool = False
    num_per_prompt: int = 1
    """Completions of each prompt."""
    as_base64: bool = False
    vector_types: tuple[str, ...] = ()
    """Forms in which vectors are given, by their names; empty: in one, by `as_base64`."""
    num_queries: int = 0
    """Prompts that the others are compared with; 0 where each is a pair."""
    most: int | None = None
    """Of the results, how many are told; None: all."""
    message: MessageForm | None = None
    """For the parsers of the answer's messages; None: the whole text is content."""
    tokens: TokenDetails | None = None
    """What the answer says of its tokens; None: nothing."""
    beam: BeamSearchParams | None = None
    """The beam search that it is the result of; None: its completions are sampled."""
    response: ResponseForm | None = None
    """Of the Responses API: what it repeats of the body."""
    infill: InfillForm | None = None
    """Of what fills a gap."""
    ignored_fields: str = ""
    """Names of fields of the body that have no effect: nobody knows them, or the chat template does not read them."""

    def headers(self) -> dict[str, str]:
        """Headers of the answer, in addition to those that every answer has."""
        return {IGNORED_FIELDS_HEADER: self.ignored_fields} if self.ignored_fields else {}


class PreparedPrompt(msgspec.Struct, frozen=True, tag="prompt"):
    """One prompt of a body, ready to run."""

    request: EngineCoreRequest
    echo: str = ""
    """What its texts begin with."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """A prompt and its tokens, for a body that asks for nothing else. There may be millions: lists are JSON already, so
    that writing them keeps nobody's event loop."""

    count: int
    ids: bytes
    """A list."""
    prompt: str = ""
    texts: bytes = b"null"
    """Of each token, as a list, where they are asked for."""

    @classmethod
    def of(cls, token_ids: list[int], prompt: str = "", texts: list[str] | None = None) -> "Tokens":
        """From lists."""
        return cls(len(token_ids), msgspec.json.encode(token_ids), prompt, msgspec.json.encode(texts))


Part = AnswerForm | PreparedPrompt | Tokens
"""What becomes of a body: first the form of the answer, then its prompts in order."""


class _AnswerSize:
    """What the answer to one body may become, as its prompts are prepared."""

    def __init__(self) -> None:
        self._num_logprobs = 0
        self._form_bytes = 0

    def add(self, request: EngineCoreRequest) -> None:
        """The completions of one more prompt. Raises RequestError when it is too much."""
        params = request.params
        if not isinstance(params, SamplingParams):
            return
        self._num_logprobs += num_answer_logprobs(params, len(request.prompt_token_ids))
        check_answer_logprobs(self._num_logprobs, params)
        if request.grammar is not None:
            self._form_bytes += params.n * len(request.grammar.source)
            if self._form_bytes > MAX_FORM_BYTES:
                raise RequestError(
                    f"structured_outputs is too large for so many completions: together they are more than "
                    f"{MAX_FORM_BYTES} characters; lower n, or send several requests",
                    "structured_outputs",
                )


class Preparer:
    """Parses, renders, tokenizes and checks; one method per kind of body."""

    def __init__(
        self,
        preparation: Preparation,
        model: ServedModel,
        parsers: ParserSettings = NO_PARSERS,
        *,
        hurried: bool = False,
    ) -> None:
        """`hurried`: what takes long is left to others (TakesTimeError)."""
        self._hurried = hurried
        self._preparation = preparation
        self._model = model
        self._parsers = parsers = parsers.for_model(preparation.tokenizer)
        self._tools = ToolForms(parsers, preparation.inputs, preparation.tokenizer)
        hides = preparation.tokenizer.hides
        self._hides_markers = any(hides(marker) for marker in parsers.markers)
        """Whether what parsers look for are special tokens, which texts leave out unless they are to be shown."""
        self._kinds: Mapping[str, Callable[[bytes], Iterator[Part]]] = {
            CHAT: self._chat,
            COMPLETIONS: self._completions,
            EMBEDDINGS: functools.partial(self._pooled, EmbeddingBody),
            POOLING: functools.partial(self._pooled, PoolingBody),
            CLASSIFY: functools.partial(self._pooled, ClassifyBody),
            TOKENIZE: self._tokenize,
            DETOKENIZE: self._detokenize,
            GENERATE: self._generate,
            INFILL: self._infill,
            COUNT_TOKENS: self._count_tokens,
            BATCH_CHAT: self._batch_chat,
            RESPONSES: self._response,
            CONTINUED_RESPONSES: self._continued_response,
            SCORE: functools.partial(self._scores, ScoreBody),
            RERANK: functools.partial(self._scores, RerankBody),
            **{name: functools.partial(self._translated, body) for name, body in TRANSLATIONS.items()},
        }

    def parts(self, kind: str, raw: bytes) -> Iterator[Part]:
        """The parts of a body, each made when it is asked for. Raises RequestError, before or between them."""
        return self._kinds[kind](raw)

    def _translated(self, kind: type[Translation], raw: bytes) -> Iterator[Part]:
        """Of a body of another API."""
        given = parse_body(raw, kind)
        with given.naming():
            self._model.check(given.served_model)
            if given.is_empty:
                yield AnswerForm(stream=given.streams, ignored_fields=given.ignored_fields)
                return
            gap = given.gap
            if gap is not None:
                given.take_gap(self._gap_prompt(gap, given.gap_tokens, "suffix").token_ids)
            body = given.translated()
            if gap is not None and isinstance(body, CompletionBody):
                body.stop_token_ids = list(self._preparation.inputs.fill_in_end_ids)
            if isinstance(body, GenerationBody):
                body.call_fields(given.names)
            match body:
                case ChatBody() as chat:
                    yield from self._chat_parts(chat, of_another_api=True)
                case CompletionBody() as completion:
                    yield from self._completion_parts(completion, of_another_api=True)
                case EmbeddingBody() as embedding:
                    parts = self._embedding_parts(embedding, given.cut)
                    yield from _with_texts(given, parts) if isinstance(given, CohereEmbedBody) else parts

    def _infill(self, raw: bytes) -> Iterator[Part]:
        """What stands in a gap. The echo is the whole prompt."""
        given = parse_body(raw, InfillBody)
        inputs = self._preparation.inputs
        with given.naming():
            self._model.check(given.served_model)
            inputs.check_generates()
            prompt = inputs.tokenize_gap(given.gap, given.gap_tokens)
            given.take_gap(prompt.token_ids)
            body = given.translated()
            body.call_fields(given.names)
            body.stop_token_ids = list(inputs.fill_in_end_ids)
            for part in self._completion_parts(body, of_another_api=True):
                if isinstance(part, AnswerForm):
                    yield msgspec.structs.replace(part, stream=given.streams, infill=given.form(prompt.is_cut))
                elif isinstance(part, PreparedPrompt):
                    text = self._preparation.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
                    yield msgspec.structs.replace(part, echo=text)

    def _gap_prompt(self, gap: Gap, max_tokens: int | None, field: str) -> GapPrompt:
        """Raises RequestError, which names the field, for a model without tokens to fill in with."""
        if self._preparation.tokenizer.fill_in is None:
            raise RequestError(
                f"{field} is not supported: this model's vocabulary has no tokens for filling in",
                field,
            )
        self._preparation.inputs.check_generates()
        return self._preparation.inputs.tokenize_gap(gap, max_tokens)

    def _count_tokens(self, raw: bytes) -> Iterator[Part]:
        given = parse_body(raw, CountTokensBody)
        with given.naming():
            body = given.translated()
            self._model.check(body.model)
            prompt = self._preparation.chats.render(
                body.messages, body.to_chat_options(self._parsers.hide_unused_tools)
            )
            yield AnswerForm(ignored_fields=body.ignored_fields)
            options = RequestOptions(add_special_tokens=False, rendered=True)
            yield Tokens.of(self._preparation.inputs.tokenize(prompt, options))

    def _response(self, raw: bytes) -> Iterator[Part]:
        given = parse_body(raw, ResponsesBody)
        given.check_alone()
        return self._response_parts(given)

    def _continued_response(self, raw: bytes) -> Iterator[Part]:
        continued = msgspec.json.decode(raw, type=Continued)
        given = parse_body(bytes(continued.body), ResponsesBody)
        given.follow(msgspec.json.decode(continued.before, type=list[dict[str, Any]]))
        return self._response_parts(given)

    def _response_parts(self, given: ResponsesBody) -> Iterator[Part]:
        with given.naming():
            body = given.translated()
            body.call_fields(given.names)
            for part in self._chat_parts(body, of_another_api=True):
                if isinstance(part, AnswerForm):
                    message = part.message
                    if part.tokens is not None and message is not None:
                        self._check_places(message)
                        message = msgspec.structs.replace(message, places_tokens=True)
                    part = msgspec.structs.replace(part, response=given.form(), message=message)
                yield part

    def _check_places(self, message: MessageForm) -> None:
        """Raises RequestError where a parser does not say which part of the text is what."""
        settings = self._parsers
        if settings.has_class(settings.tool_calls if message.tools and not message.is_forced else None):
            raise RequestError(
                "log-probabilities of messages cannot be told where a class of a plug-in takes the text apart: leave "
                "top_logprobs and include out, or use /v1/chat/completions",
                "top_logprobs",
            )

    def _chat(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, ChatBody)
        with body.naming():
            yield from self._chat_parts(body)

    def _batch_chat(self, raw: bytes) -> Iterator[Part]:
        """A form and a prompt for each conversation."""
        body = parse_body(raw, BatchChatBody)
        chats = body.chats()
        self._check_total(len(chats), 1, body.max_tokens or body.max_completion_tokens)
        size = _AnswerSize()
        for chat in chats:
            with chat.naming():
                yield from self._chat_parts(chat, size=size)

    def _chat_parts(
        self, body: ChatBody, of_another_api: bool = False, size: _AnswerSize | None = None
    ) -> Iterator[Part]:
        """`of_another_api`: a max_tokens beyond the room in the context means the room, as clients of those expect, and
        reasoning may be left out where none is told apart. `size`: of the answer that it is a part of."""
        self._model.check(body.model)
        params = body.to_sampling_params(self._preparation.default_params, self._preparation.max_new_tokens)
        self._check_total(1, params.n, params.max_tokens)
        beam, params = self._beam(body, params)
        self._check_parsers(body, of_another_api)
        chat_options = body.to_chat_options(self._parsers.hide_unused_tools)
        body.leave_unread(self._preparation.chats.unread_variables(chat_options))
        prompt = self._preparation.chats.render(body.messages, chat_options)
        message = reasoning = None
        if not params.detokenize and body.calls_tools:
            raise RequestError("detokenize=false is not allowed with tools: calls are read from the text", "detokenize")
        if params.detokenize and (self._parsers.reasoning is not None or body.calls_tools):
            message = body.message_form(unmarked(prompt))
            reasoning = self._parsers.reasoning_before(message)
            if self._hides_markers:
                params = params.replace(skip_special_tokens=False)
            message = msgspec.structs.replace(message, shows_special_tokens=not params.skip_special_tokens)
        yield _form_of(body, params, beam, message)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=bool(body.add_special_tokens),
            rendered=True,
            clamp_max_tokens=of_another_api,
            hurried=self._hurried,
            reasoning=reasoning,
            form_field=body.form_field or "",
        )
        with naming_top_logprobs(), naming_tools(body), naming_form(body.form_field):
            params, options = self._tools.hold(body, message, params, options)
            prepared = self._preparation.inputs.prepare(prompt, params, options).request
            (size or _AnswerSize()).add(prepared)
        yield PreparedPrompt(prepared, body.echoed)

    def _check_parsers(self, body: ChatBody, of_another_api: bool) -> None:
        """Raises RequestError when the answer needs a parser that the server was not started with."""
        if body.choice.mode == REQUIRED and body.use_beam_search:
            raise RequestError("tool_choice cannot be kept by a beam search", "tool_choice")
        if body.calls_tools and self._parsers.tool_calls is None and body.choice.mode != REQUIRED:
            raise RequestError(
                "tools can be called where the server was started with --enable-auto-tool-choice and "
                "--tool-call-parser, which this one was not; send tool_choice 'none', or no tools",
                "tools",
            )
        if body.thinking_token_budget is not None and self._parsers.reasoning_format is None:
            if not of_another_api:
                raise RequestError(
                    "thinking_token_budget needs a server that was started with --reasoning-parser: this one does not "
                    "know where reasoning ends",
                    "thinking_token_budget",
                )
            body.leave_out(["thinking.budget_tokens"])
            body.thinking_token_budget = None
        if body.include_reasoning is False and self._parsers.reasoning is None:
            if of_another_api:
                body.leave_out(["thinking.display"])
                return
            raise RequestError(
                "include_reasoning=false needs a server that was started with --reasoning-parser: this one does not "
                "tell reasoning from content",
                "include_reasoning",
            )

    def _completions(self, raw: bytes) -> Iterator[Part]:
        return self._completion_parts(parse_body(raw, CompletionBody))

    def _generate(self, raw: bytes) -> Iterator[Part]:
        """The echo is the prompt."""
        body = parse_body(raw, GenerateBody)
        body.echo = True
        return self._completion_parts(body)

    def _completion_parts(self, body: CompletionBody, of_another_api: bool = False) -> Iterator[Part]:
        self._model.check(body.model)
        params = body.to_sampling_params(self._preparation.default_params, self._preparation.max_new_tokens)
        self._check_total(len(body.prompt), params.n, body.max_tokens)
        beam, params = self._beam(body, params)
        yield _form_of(body, params, beam)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens is not False,
            clamp_max_tokens=body.max_tokens is None or of_another_api,
            hurried=self._hurried,
            form_field=body.form_field or "",
        )
        size = _AnswerSize()
        for prompt in body.prompt:
            with naming_form(body.form_field):
                prepared = self._prepared(prompt, params, options, bool(body.echo))
                size.add(prepared.request)
            yield prepared

    def _pooled(self, kind: type[InputBody], raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, kind)
        with body.naming():
            yield from self._embedding_parts(body)

    def _embedding_parts(self, body: InputBody, cut: Mapping[str, Any] | None = None) -> Iterator[Part]:
        """`cut`: arguments of `tokenize_cut`, by which prompts are cut that do not fit; None: as the body says."""
        cut = body.cut if cut is None else cut
        self._model.check(body.model)
        params = body.to_pooling_params()
        chat = body.to_chat()
        as_base64 = isinstance(body, EmbeddingBody) and body.encoding_format == "base64"
        yield AnswerForm(as_base64=as_base64, ignored_fields=body.ignored_fields)
        options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=body.adds_special_tokens,
            rendered=chat is not None,
        )
        rendered = (
            None
            if chat is None
            else self._preparation.chats.render(chat.messages, chat.to_chat_options(), generates=False)
        )
        for prompt in body.input if rendered is None else [rendered]:
            if cut is not None:
                prompt = self._preparation.inputs.tokenize_cut(prompt, options, **cut)
            yield PreparedPrompt(self._preparation.inputs.prepare(prompt, params, options).request)

    def _tokenize(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, TokenizeBody)
        self._model.check(body.model)
        yield AnswerForm(ignored_fields=body.ignored_fields)
        chat = body.to_chat()
        text = (
            body.prompt or "" if chat is None else self._preparation.chats.render(chat.messages, chat.to_chat_options())
        )
        options = RequestOptions(add_special_tokens=body.adds_special_tokens, rendered=chat is not None)
        token_ids = self._preparation.inputs.tokenize(text, options)
        texts = None
        if body.return_token_strs:
            texts = [self._preparation.tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids]
        yield Tokens.of(token_ids, unmarked(text) if chat is not None else text, texts)

    def _detokenize(self, raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, DetokenizeBody)
        self._model.check(body.model)
        yield AnswerForm(ignored_fields=body.ignored_fields)
        self._preparation.inputs.check_token_ids(body.tokens, "tokens")
        yield Tokens.of(body.tokens, self._preparation.tokenizer.decode(body.tokens, skip_special_tokens=False))

    def _scores(self, kind: type[ScoreBody] | type[RerankBody], raw: bytes) -> Iterator[Part]:
        body = parse_body(raw, kind)
        self._model.check(body.model)
        inputs = self._preparation.inputs
        pairs = inputs.pooling.pairs
        queries, documents = body.sides
        first, second = body.fields
        yield AnswerForm(num_queries=0 if pairs else len(queries), most=body.most, ignored_fields=body.ignored_fields)
        if pairs:
            params = PoolingParams(use_activation=body.use_activation)
            pair_cut = body.pair_cut(inputs.pair_cut(body.joint_cut))
            for index, text in enumerate(documents):
                with body.naming({"text_1": first, "text_2": second, "prompt": second}):
                    pair = inputs.prepare_pair(queries[index % len(queries)], text, params, cut=pair_cut)
                yield PreparedPrompt(pair.request, text)
            return
        params, options = PoolingParams(normalize=True), RequestOptions()
        sides = ((first, queries, body.max_tokens_per_query), (second, documents, body.max_tokens_per_doc))
        for name, texts, most in sides:
            cut = body.cut_of(most)
            for text in texts:
                with body.naming({"prompt": name}):
                    prompt = text if cut is None else inputs.tokenize_cut(text, options, **cut)
                    prepared = inputs.prepare(prompt, params, options)
                yield PreparedPrompt(prepared.request, text)

    def _beam(
        self, body: ChatBody | CompletionBody, params: SamplingParams
    ) -> tuple[BeamSearchParams | None, SamplingParams]:
        """The search that a body asks for, and with what its prompts are prepared. Raises RequestError."""
        beam = body.beam_params(params)
        if beam is None:
            return None, params
        first = first_params(beam, self._preparation.inputs.end_token_ids)
        self._preparation.check_beams(beam.beam_width, first.logprobs or 0, "n")
        return beam, first.replace(max_tokens=params.max_tokens)

    def _check_total(self, num_prompts: int, n: int, max_tokens: int | None) -> None:
        """Raises RequestError when the completions of one body may get more tokens than the deployment takes from one
        call. What the client did not ask for in so many words does not count; a single completion has the context as
        its limit."""
        num_completions = num_prompts * n
        most = self._preparation.max_call_tokens
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


def _form_of(
    body: ChatBody | CompletionBody,
    params: SamplingParams,
    beam: BeamSearchParams | None,
    message: MessageForm | None = None,
) -> AnswerForm:
    if beam is not None:
        return AnswerForm(
            num_per_prompt=beam.beam_width, message=message, beam=beam, ignored_fields=body.ignored_fields
        )
    details = body.token_details(params)
    return AnswerForm(
        bool(body.stream),
        body.wants_usage,
        body.wants_running_usage,
        params.n,
        message=message,
        tokens=details if details.any() else None,
        ignored_fields=body.ignored_fields,
    )


def _with_texts(given: CohereEmbedBody, parts: Iterable[Part]) -> Iterator[Part]:
    """The parts of a body of Cohere's: echoes are the texts, as they came."""
    texts = iter(given.texts)
    for part in parts:
        if isinstance(part, AnswerForm):
            part = msgspec.structs.replace(part, vector_types=tuple(given.vector_types))
        elif isinstance(part, PreparedPrompt):
            part = msgspec.structs.replace(part, echo=next(texts))
        yield part
