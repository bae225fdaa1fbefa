"""Composition: from settings to a running engine, and to a server in front of it. Start-up order is visible here."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagemill import envs
from pagemill.artifacts.describe import describe, locate
from pagemill.catalog.platforms import PLATFORMS
from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import ModelFacts
from pagemill.config.resolve import resolve
from pagemill.config.sections import ServerConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.log import get_logger
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import load_tokenizer
from pagemill.utils.timing import PhaseTimer

logger = get_logger(__name__)

WORKER = "pagemill.worker.worker:Worker"


@dataclass(frozen=True)
class LaunchedEngine:
    """A running engine in this process, with what its users ask about it."""

    llm: AsyncLLM
    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def facts(self) -> ModelFacts:
        """What the model's files say."""
        return self.config.facts


def build_config(args: EngineArgs) -> EngineConfig:
    """Find the model, ask the machine, and complete the settings; the decisions are logged at DEBUG."""
    draft = args.draft
    model = draft.model
    path = locate(model.model, revision=model.revision, download_dir=model.download_dir)
    facts = describe(
        model.model,
        path,
        hf_overrides=model.hf_overrides,
        generation_config=model.generation_config,
        load_format=model.load_format,
    )
    config, decisions = resolve(draft, facts, PLATFORMS.resolve("cpu")().facts())
    for decision in decisions:
        logger.debug("%s = %s (%s)", decision.field, decision.value, decision.why)
    return config


def build_inproc(args: EngineArgs, *, inline: bool) -> LaunchedEngine:
    """An engine in this process. `inline` runs its steps on the caller's event loop, otherwise on a thread."""
    return start_inproc(build_config(args), inline=inline)


def start_inproc(config: EngineConfig, *, inline: bool) -> LaunchedEngine:
    """`build_inproc` from a complete configuration. The tokenizer loads on a thread while the weights do."""
    timer = PhaseTimer()
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        tokenizer_soon = pool.submit(_load_tokenizer, config)
        with timer.phase("engine"):
            overlap = config.scheduler.async_scheduling is True
            core = EngineCore(config, UniprocExecutor(WORKER, config, overlap=overlap))
        with timer.phase("tokenizer"):
            tokenizer = tokenizer_soon.result()
    client = InprocClient(core, inline=inline)
    llm = AsyncLLM(client, tokenizer, config.facts, config.scheduler)
    logger.info(
        "%s, %s, %d tokens of KV cache, ready: %s",
        config.facts.name,
        config.model.dtype,
        core.ready.num_blocks * core.ready.block_size,
        timer.summary(),
    )
    return LaunchedEngine(llm, config, tokenizer)


def serve(args: EngineArgs, server: ServerConfig) -> int:
    """Serve over HTTP until SIGINT or SIGTERM; the exit status. Wrong settings, a model that is not there and a port
    in use are found, in this order, before the weights are loaded."""
    from pagemill.serve.http.app import build_app  # deferred: fastapi, which engines without a server do not need
    from pagemill.serve.http.server import bind  # deferred: uvicorn
    from pagemill.serve.http.server import serve as serve_http  # deferred: uvicorn

    server = dataclasses.replace(server, api_key=server.api_key or envs.api_key())
    config = build_config(args)
    sock = bind(server.host, server.port)
    with contextlib.closing(sock):
        launched = start_inproc(config, inline=False)
        serve_http(build_app(launched.llm, server), sock, server.uvicorn_log_level)
    return 0


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    model = config.model
    path = Path(config.facts.path) if model.tokenizer is None else locate(model.tokenizer, revision=model.revision)
    return load_tokenizer(path, chat_template_file=model.chat_template)
