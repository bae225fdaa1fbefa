"""Bodies of answers, as /openapi.json describes them. They are written elsewhere, as bytes; nothing here is made when a
request is answered. Fields that are not listed may come with them."""

import builtins
from typing import Any, Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """What became of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the tokens of the completions are: where a parser tells reasoning apart, and where drafts were verified."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    """Those that were drafts."""
    rejected_prediction_tokens: int | None = None
    """Drafts that are not among them."""


class TokenCounts(BaseModel):
    """Tokens of a request and its answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class _Head(BaseModel):
    """What answers and events begin with."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str


class CalledFunction(BaseModel):
    """The function of a call, and its arguments as a text of JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls", "repetition", "abort"]


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or stop id that ended it."""
    token_ids: list[int] | None = None


class ChatCompletion(_Head):
    """A conversation's continuation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenCounts


class ChatDelta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(_Head):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenCounts | None = None


class TextChoice(BaseModel):
    """The continuation of one prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    """None in events of a stream but the last of the choice."""
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Completion(_Head):
    """Continuations of prompts, or in a stream what is new of them."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenCounts | None = None


class ResponseObject(BaseModel):
    """An answer as items; further fields say what was asked for."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(BaseModel):
    """An event of a streamed response."""

    type: str
    sequence_number: int


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationObject(BaseModel):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    """What is stored no more."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class ConversationItem(BaseModel):
    """A message, reasoning, a call or its result; further fields are those of its type."""

    id: str
    type: str


class DeletedResponse(BaseModel):
    """What is stored no more."""

    id: str
    object: Literal["response"]
    deleted: bool


class Embedding(BaseModel):
    """A vector: numbers, or the base64 of little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Head):
    """Vectors of texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    usage: TokenCounts


class Pooled(BaseModel):
    """A vector under another name."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class Pooling(_Head):
    """Vectors of texts, in their order."""

    object: Literal["list"]
    data: list[Pooled]
    usage: TokenCounts


class Classified(BaseModel):
    """The likeliest class of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(_Head):
    """Classes of texts, in their order."""

    object: Literal["list"]
    data: list[Classified]
    usage: TokenCounts


class Score(BaseModel):
    """Of one pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(_Head):
    """Of pairs of texts, in their order."""

    object: Literal["list"]
    data: list[Score]
    usage: TokenCounts


class RankedDocument(BaseModel):
    """A document, where it was in the request, and how like the query it is."""

    index: int
    document: dict[str, str]
    relevance_score: float


class Ranking(BaseModel):
    """Documents, the likest first."""

    id: str
    model: str
    usage: TokenCounts
    results: list[RankedDocument]


class Tokenized(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


class Rendered(BaseModel):
    """What a prompt would be run with."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    """Those that differ from their defaults."""
    stream: bool
    priority: int


class ClaudeUsage(BaseModel):
    """Tokens; those of the prompt that were found in the cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ClaudeMessage(BaseModel):
    """The assistant's, in blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None
    stop_sequence: str | None
    usage: ClaudeUsage


class ClaudeEvent(BaseModel):
    """An event of a streamed message: message_start, ping, content_block_start, content_block_delta,
    content_block_stop, message_delta, message_stop, or error."""

    type: str


class InputTokens(BaseModel):
    """How many there are."""

    input_tokens: int


class OllamaAnswer(BaseModel):
    """An answer, or a line of it; the last has the counts."""

    model: str
    created_at: str
    done: bool
    message: dict[str, Any] | None = None
    response: str | None = None
    thinking: str | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    """Durations are in nanoseconds."""
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class CohereByType(BaseModel):
    """Vectors of texts in each form that was asked for, in the order of the texts."""

    float: list[list[builtins.float]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereVersion(BaseModel):
    """The version of Cohere's API that an answer follows."""

    version: Literal["2"]


class CohereUnits(BaseModel):
    """How many tokens were computed, as Cohere bills them."""

    input_tokens: int


class CohereMeta(BaseModel):
    """What Cohere's answers say about themselves."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereVectors(BaseModel):
    """The vectors of texts, by the forms that were asked for."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereByType
    texts: list[str]
    meta: CohereMeta


class OllamaVectors(BaseModel):
    """Vectors of texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(BaseModel):
    """The vector of one text."""

    embedding: list[float]


class OllamaModel(BaseModel):
    """A model."""

    name: str
    model: str
    modified_at: str
    size: int
    """Of its files, in bytes."""
    digest: str
    details: dict[str, Any]


class OllamaModels(BaseModel):
    """The names of the model."""

    models: list[OllamaModel]


class OllamaShown(BaseModel):
    """What a model is and can do."""

    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(BaseModel):
    """A version."""

    version: str


class ServerLoad(BaseModel):
    """Completions that run and wait."""

    server_load: int


class Props(BaseModel):
    """The model, and how requests are sampled that say nothing."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(BaseModel):
    """One of the requests that may run at once."""

    id: int
    n_ctx: int
    is_processing: bool


class Generated(BaseModel):
    """A prompt with each of its continuations, as far as they have come."""

    text: list[str]


class Infilled(BaseModel):
    """What stands in a gap, or a part of it; the last has what follows `tokens_evaluated`. Members may be left out by
    `response_fields`."""

    index: int | None = None
    content: str | None = None
    tokens: list[int] | None = None
    stop: bool | None = None
    id_slot: int | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    model: str | None = None
    prompt: str | None = None
    generation_settings: dict[str, Any] | None = None
    has_new_line: bool | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    timings: dict[str, float] | None = None


class ServerInfo(BaseModel):
    """The settings of a server."""

    version: str
    model: str
    config: dict[str, Any]


class CallResults(BaseModel):
    """What each worker has answered."""

    results: list[Any]


class ProfileFiles(BaseModel):
    """What was recorded."""

    files: list[str]
    """Names in the folder for profiles, one per worker."""


class Done(BaseModel):
    """What was asked for was done."""

    success: bool


class Status(BaseModel):
    """What the engines do now."""

    status: str


class Draining(BaseModel):
    """Whether new requests are refused."""

    status: str
    num_requests: int
    """That run and wait, in all API servers together."""


class IsPaused(BaseModel):
    """Whether no step is begun."""

    is_paused: bool
