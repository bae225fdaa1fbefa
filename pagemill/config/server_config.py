"""`ServerConfig`: the settings of the HTTP server. Not part of an engine's configuration."""

from dataclasses import dataclass

from pagemill.config.choices import STRICT_LEVELS, StrictLevel
from pagemill.config.fields import setting


@dataclass(frozen=True)
class ServerConfig:
    """Where the HTTP server listens, who may use it, and how much of it."""

    host: str = setting("127.0.0.1", "address to listen on; the default is reachable from this machine only")
    port: int = setting(8000, "port to listen on; 0 takes a free one", low=0)
    served_model_name: tuple[str, ...] | None = setting(
        None,
        "name in the API, or several, the first of which is that of answers and metrics (default: the --model value)",
    )
    model_alias: tuple[str, ...] | None = setting(
        None,
        "further names that requests may use, as PATTERN=NAME: * in PATTERN stands for any characters, NAME is a "
        "served name or default",
    )
    api_key: tuple[str, ...] | None = setting(
        None, "key that clients must send as a bearer token, or several, any of which will do"
    )
    reasoning_parser: str | None = setting(
        None,
        "format of the reasoning, which is told from the content; auto, hf: by the model's files (docs/tool-calls.md)",
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model call the tools of a request; needs a tool call parser"
    )
    tool_call_parser: str | None = setting(
        None, "format in which the model calls tools; auto, hf: by the model's files (docs/tool-calls.md)"
    )
    reasoning_parser_plugin: str | None = setting(
        None, "Python file that adds parsers for --reasoning-parser (docs/how-to/add-a-parser.md)"
    )
    tool_parser_plugin: str | None = setting(
        None, "Python file that adds parsers for --tool-call-parser (docs/how-to/add-a-parser.md)"
    )
    tool_strict_level: str = setting(
        StrictLevel.ENVELOPE,
        "what calls are held to that the model decides to make: off, strict-functions, envelope, all "
        "(docs/tool-calls.md); auto, function and parameter are other names of the last three",
        choices=tuple(STRICT_LEVELS),
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "with tool_choice none, the chat template does not get the tools of the request"
    )
    share_prefix_cache: bool = setting(
        False, "with several API keys: requests of different keys may use each other's cached prefixes"
    )
    uvicorn_log_level: str = setting(
        "warning",
        "log level of the HTTP server; at debug and info, there is a line for each request that was answered (access "
        "log)",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    disable_uvicorn_access_log: bool = setting(False, "no access log, whatever --uvicorn-log-level says")
    disable_access_log_for_endpoints: str | None = setting(
        None, "paths that the access log leaves out, separated by commas, such as /health,/metrics"
    )
    enable_log_requests: bool = setting(
        False, "log a line for each request for the model, without its prompt but at PAGEMILL_LOGGING_LEVEL=DEBUG"
    )
    enable_log_outputs: bool = setting(False, "with --enable-log-requests: log what was generated, when it has ended")
    enable_log_deltas: bool = setting(False, "with --enable-log-outputs: log every part of it that is streamed")
    max_log_len: int = setting(2048, "most characters of a prompt or an answer in one line of the log", low=0)
    log_error_stack: bool = setting(False, "log where an error was raised that a client is told of")
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM, while new ones get 503", low=0
    )
    allowed_origins: str | None = setting(
        None, "origins whose pages browsers let use the API (CORS), separated by commas or as a JSON list; *: all"
    )
    allowed_hosts: str | None = setting(
        None,
        "names under which clients may reach the server (the Host header), separated by commas or as a JSON list, "
        "in addition to addresses, localhost and names without a dot; *: all (default: all, but only those "
        "on a loopback address without --api-key)",
    )
    h11_max_incomplete_event_size: int = setting(
        65_536, "most bytes of the head of a request, its first line and headers; more get 431", low=1024
    )
    h11_max_header_count: int = setting(256, "most headers of a request; more get 431", low=1)
    timeout_keep_alive: float = setting(5.0, "seconds after which a connection without a request is closed", low=0)
    timeout_request_head: float = setting(20.0, "seconds that a client gets to send the head of a request", low=1)
    timeout_request_body: float = setting(120.0, "seconds that a client gets to send the body of a request", low=1)
    timeout_slow_reader: float = setting(
        60.0, "seconds after which a client that does not read its answer is disconnected, and its request ended", low=1
    )
    uds: str | None = setting(None, "path of a unix socket to listen on, in place of host and port")
    ssl_certfile: str | None = setting(None, "file with the certificate, for TLS")
    ssl_keyfile: str | None = setting(None, "file with its key (default: it is in the same file)")
    ssl_ca_certs: str | None = setting(None, "file with the authorities whose certificates clients may have")
    ssl_cert_reqs: int = setting(0, "whether clients need a certificate: 0 no, 1 they may have one, 2 yes", low=0)
    ssl_ciphers: str | None = setting(None, "ciphers of TLS up to 1.2 (default: those of Python)")
    enable_ssl_refresh: bool = setting(False, "load the certificate again when its files change")
    rate_limit_requests: int | None = setting(
        None,
        "requests that each API key (without keys: all clients together) may send in a minute; more get 429",
        low=1,
    )
    rate_limit_tokens: int | None = setting(
        None, "tokens of prompts and answers that each API key may use in a minute; then 429", low=1
    )
    sse_keep_alive_interval: float = setting(
        15.0, "seconds of silence after which a stream of events says that it is alive, by a comment; 0: never", low=0
    )
    response_store_bytes: int = setting(
        0,
        "bytes of memory for responses and conversations that clients have stored, split evenly among the API keys; "
        "the oldest make room; 0: nothing is stored",
        low=0,
    )
    response_store_ttl: float = setting(
        3600.0, "seconds that a response or a conversation stays stored after it was written", low=1
    )
    protect_metrics: bool = setting(False, "with --api-key, /metrics needs the key too")
    root_path: str | None = setting(
        None,
        "what the paths of all routes begin with, such as /llm, behind a proxy that leaves it there; paths without it "
        "are served too, for one that takes it off",
    )
    middleware: tuple[str, ...] | None = setting(
        None,
        "ASGI middleware of your own, as the dotted path of a class or of a coroutine function of a request and "
        "call_next, or several; it sees requests that the key and the limits have let through",
    )
    disable_fastapi_docs: bool = setting(False, "no /openapi.json and no /docs")
    limit_concurrency: int | None = setting(
        None,
        "most connections of one API server; at more, those without a request are closed, or else new ones get 503 "
        "(default: what the limit of open files allows, at most 16384)",
        low=1,
    )
