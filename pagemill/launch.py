"""Composition: from settings to a running engine, and to a server in front of it. Start-up order is visible here."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pagemill import envs
from pagemill.artifacts.describe import describe, locate
from pagemill.catalog.platforms import PLATFORMS
from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import ModelFacts
from pagemill.config.resolve import resolve
from pagemill.config.sections import ServerConfig, SupervisionConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.factory import make_executor
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineReady
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import tokenizer_of
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
        tokenizer_soon = pool.submit(tokenizer_of, config.model, config.facts)
        with timer.phase("engine"):
            core = EngineCore(config, make_executor(config, WORKER))
        with timer.phase("tokenizer"):
            tokenizer = tokenizer_soon.result()
    client = InprocClient(core, inline=inline)
    llm = AsyncLLM(client, tokenizer, config.facts, config.scheduler)
    _say_ready(config, core.ready, timer)
    return LaunchedEngine(llm, config, tokenizer)


def serve(args: EngineArgs, server: ServerConfig, supervision: SupervisionConfig) -> int:
    """Serve over HTTP until SIGINT or SIGTERM; the exit status. Wrong settings, a model that is not there and a port
    in use are found, in this order, before the weights are loaded. The engine runs in a process of its own."""
    import setproctitle  # deferred: only servers have titles

    from pagemill.deployment import Deployment  # deferred, with the next three: zmq, fastapi and uvicorn
    from pagemill.front_end import FrontEndPlace, make_fleet, serve_fleet
    from pagemill.serve.http.server import bind
    from pagemill.supervisor import Patience

    server = dataclasses.replace(server, api_key=server.api_key or envs.api_key())
    config = build_config(args)
    patience = Patience(supervision.engine_stall_timeout, supervision.engine_hang_timeout)
    setproctitle.setproctitle("pagemill: api server 0")
    with contextlib.closing(bind(server.host, server.port)) as sock, Deployment(config, WORKER, 1, patience) as engines:
        timer = PhaseTimer()
        engines.start()
        with timer.phase("tokenizer"):
            tokenizer = tokenizer_of(config.model, config.facts)
        with timer.phase("engine"):
            ups = engines.wait_ready()
        fleet = make_fleet(ups, FrontEndPlace(0, engines.secret))
        engines.subscribe(fleet.notify)
        _say_ready(config, ups[0].ready, timer)
        serve_fleet(fleet, tokenizer, config, server, sock)
        engines.unsubscribe(fleet.notify)
    return 0


def _say_ready(config: EngineConfig, ready: EngineReady, timer: PhaseTimer) -> None:
    logger.info(
        "%s, %s, %d tokens of KV cache, ready: %s",
        config.facts.name,
        config.model.dtype,
        ready.num_blocks * ready.block_size,
        timer.summary(),
    )
