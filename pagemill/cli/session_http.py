"""`HttpSession`: a model behind an OpenAI-compatible URL. Knows the API's wire format, not what serves it."""

import ipaddress
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from pagemill.cli.errors import ServerError
from pagemill.cli.sampling_flags import Params
from pagemill.cli.session import Delta, Message, Usage
from pagemill.utils.sse import SseParser

CONNECT_TIMEOUT_S = 5.0
MAX_SHOWN_CHARS = 300


class HttpSession:
    """Streams answers from a server. Reading has no time limit: a long prompt may wait for a busy engine."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url` with or without /v1. `model` None takes the server's. `transport` replaces the network in tests."""
        self.url = base_url(url)
        self.model = model or self.url
        self._model = model
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            trust_env=not is_this_machine(self.url),
            transport=transport,
        )

    def stream_chat(self, messages: Sequence[Message], params: Params) -> Generator[Delta, None, None]:
        return self._stream("/v1/chat/completions", {"messages": [dict(message) for message in messages]}, params)

    def stream_completion(self, prompt: str, params: Params) -> Generator[Delta, None, None]:
        return self._stream("/v1/completions", {"prompt": prompt}, params)

    def close(self) -> None:
        self._client.close()

    def _stream(self, path: str, question: Mapping[str, Any], params: Params) -> Generator[Delta, None, None]:
        body = {**question, **params, "stream": True, "stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        try:
            with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerError(refusal(response))
                yield from _deltas(response)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise ServerError(
                f"no server answers at {self.url}: start one with 'pagemill serve', "
                "or add --model smollm2 to run a model in this process"
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None


def _deltas(response: httpx.Response) -> Iterator[Delta]:
    """The pieces of a streamed answer, up to [DONE]. Raises ServerError when it ends before that."""
    parser = SseParser()
    for chunk in response.iter_bytes():
        for data in parser.feed(chunk):
            if data == "[DONE]":
                return
            yield parse_chunk(data)
    raise ServerError("the server broke off its answer")


def parse_chunk(data: str) -> Delta:
    """One event of a chat or completion stream. Raises ServerError for an error event, or one that is no chunk."""
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError(f"the server sent something that is not a chunk: {data[:MAX_SHOWN_CHARS]}")
    if "error" in chunk:
        raise ServerError(f"the server failed: {_message(chunk)}")
    usage = _usage(chunk.get("usage"))
    if not chunk.get("choices"):
        return Delta(usage=usage)
    choice = chunk["choices"][0]
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return Delta(text or "", choice.get("finish_reason"), usage)


def _usage(counts: Mapping[str, Any] | None) -> Usage | None:
    if not counts:
        return None
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0), cached)


def refusal(response: httpx.Response) -> str:
    """What to tell the user of an answer that is none."""
    if response.status_code == 401:
        return "the server wants a key: give --api-key, or set PAGEMILL_API_KEY"
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text[:MAX_SHOWN_CHARS] or response.reason_phrase
    return f"the server answered {response.status_code}: {message}"


def _message(body: Any) -> str:
    """The message of an OpenAI error object, or whatever is there instead."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"] if isinstance(error, dict) and "message" in error else error or body)[:MAX_SHOWN_CHARS]


def base_url(url: str) -> str:
    """The address of a server without /v1. Raises ServerError for what is no URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServerError(f"--url {url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerError(f"--url {url!r} is not of the form http://host:port")
    return url.rstrip("/").removesuffix("/v1")


def is_this_machine(url: str) -> bool:
    """Whether a proxy from the environment would be nonsense."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
