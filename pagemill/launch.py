"""Composition: from settings to a running engine, and to a server in front of it. Start-up order is visible here."""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pagemill import envs
from pagemill.artifacts.describe import describe, locate
from pagemill.catalog.executors import EXECUTORS
from pagemill.catalog.quantization import check_quantization
from pagemill.config.arguments import EngineArgs
from pagemill.config.engine_config import EngineConfig
from pagemill.config.event_endpoints import check_endpoints
from pagemill.config.facts import ModelFacts
from pagemill.config.fleet_plan import FleetPlan, needs_lockstep, plan_fleet, shares_experts
from pagemill.config.graph_mode import GraphMode
from pagemill.config.no_effect import IdleSetting, Place, idle_settings
from pagemill.config.resolve import resolve
from pagemill.config.sections import FleetConfig, ServerConfig
from pagemill.config.server_access import access_of, is_loopback
from pagemill.config.thread_lists import AUTO, NOBIND, join_lists, parse_lists
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.factory import make_executor
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineReady
from pagemill.observability.start_table import start_table
from pagemill.platforms.choose import choose_platform
from pagemill.platforms.thread_plan import ThreadWish
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.serve.processing.checks import shown
from pagemill.serve.processing.seeds import RequestSeeds
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.load import tokenizer_of
from pagemill.utils.collector import paused
from pagemill.utils.descriptors import raise_limit
from pagemill.utils.signals import no_sudden_end
from pagemill.utils.timing import PhaseTimer
from pagemill.utils.torch_libraries import load_torch_library

if TYPE_CHECKING:
    from pagemill.deployment import Deployment

logger = get_logger(__name__)

CLOSING_S = 5.0
"""What front ends get to close after they have drained."""
_ENDING = (signal.SIGINT, signal.SIGTERM)
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
    """Find the model, ask the machine, and complete the settings. The decisions that matter are logged as a
    table, all of them at DEBUG."""
    draft = args.draft
    model = draft.model
    if model.quantization is not None:
        check_quantization(model.quantization)
    path = locate(model.model, revision=model.revision, download_dir=model.download_dir)
    facts = describe(
        model.model,
        path,
        hf_overrides=model.hf_overrides,
        generation_config=model.generation_config,
        load_format=model.load_format,
    )
    device = choose_platform(draft.device.device).facts()
    if draft.cpu.cpu_threads_bind is None and device.kind == "cpu":
        cpu = dataclasses.replace(draft.cpu, cpu_threads_bind=envs.cpu_threads_bind())
        draft = dataclasses.replace(draft, cpu=cpu)
    config, decisions = resolve(draft, facts, device)
    EXECUTORS.check(config.parallel.distributed_executor_backend or "uni")
    for decision in decisions:
        logger.debug("%s = %s (%s)", decision.field, decision.value, decision.why)
    idle = idle_settings(args.given, Place(device.kind, config.model, config.cache))
    idle += [IdleSetting(name, "nothing reads this variable of the environment") for name in envs.unread()]
    table = start_table(decisions, idle)
    if table:
        logger.info("%s\n%s", facts.name, table)
    if facts.unused_generation_defaults:
        values = ", ".join(f"{name}={shown(value)}" for name, value in facts.unused_generation_defaults.items())
        logger.warning(
            "%s recommends %s for sampling, which has no effect yet: answers may differ from those of other servers",
            facts.name,
            values,
        )
    return config


def build_inproc(args: EngineArgs, *, inline: bool) -> LaunchedEngine:
    """An engine in this process. `inline` runs its steps on the caller's event loop, otherwise on a thread."""
    with paused():
        config = build_config(args)
        alone = config.parallel.distributed_executor_backend == "uni"
        return start_inproc(_place_threads(args, config, front_end=not alone, own_process=not alone), inline=inline)


def start_inproc(config: EngineConfig, *, inline: bool) -> LaunchedEngine:
    """`build_inproc` from a complete configuration. The tokenizer loads on a thread while the weights do."""
    timer = PhaseTimer()
    with contextlib.ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(1, "tokenizer"))
        tokenizer_soon = pool.submit(tokenizer_of, config.model, config.facts)
        with timer.phase("engine"):
            if config.parallel.distributed_executor_backend == "uni":
                load_torch_library()  # the tokenizer is made meanwhile
            core = EngineCore(config, make_executor(config, WORKER))
        opened.callback(core.shutdown)
        with timer.phase("tokenizer"):
            tokenizer = tokenizer_soon.result()
        client = InprocClient(core, inline=inline)
        opened.callback(client.stop)
        llm = AsyncLLM(
            client,
            tokenizer,
            config.facts,
            config.scheduler,
            cache=config.cache,
            log_interval_s=envs.log_stats_interval_s(),
            log_stats=not config.observability.disable_log_stats,
            seeds=RequestSeeds(config.model.seed),
            pooler=config.model.pooler_config if config.model.pools else None,
        )
        _say_ready(config, core.ready, timer)
        opened.pop_all()
        pool.shutdown()
    return LaunchedEngine(llm, config, tokenizer)


@no_sudden_end()
def serve(args: EngineArgs, server: ServerConfig, fleet: FleetConfig) -> int:
    """Serve over HTTP until SIGINT, SIGTERM or SIGHUP; the exit status, which is 1 when all engines are gone for good.
    Wrong settings, a model that is not there and a port in use are found, in this order, before the weights are loaded.
    Engines run in processes of their own."""
    from pagemill.deployment import Deployment  # deferred, with the next three: zmq, fastapi and uvicorn
    from pagemill.headless import run_headless
    from pagemill.serve.http.server import bind
    from pagemill.supervisor import Patience

    plan = plan_fleet(fleet)
    secret = _shared_secret(plan)
    if not plan.headless:
        server = _with_keys(server)
    raise_limit()
    config = _place_threads(args, build_config(args), len(plan.local), front_end=not plan.headless)
    check_endpoints(config.cache.kv_events_config, fleet.data_parallel_size)
    envs.log_stats_interval_s()  # for front ends that are not there yet
    patience = Patience(fleet.engine_stall_timeout, fleet.engine_hang_timeout)
    joint = shares_experts(fleet, plan, config.parallel)
    if joint and config.graphs.compilation_config.cudagraph_mode != GraphMode.NONE.value:
        raise ConfigError(
            "enable_expert_parallel=True with several engines needs --enforce-eager: how many tokens the others have "
            "is known in the step only, and a captured graph cannot ask"
        )
    lockstep, timeout_s = needs_lockstep(fleet, joint), fleet.data_parallel_node_timeout
    if plan.headless:
        return run_headless(config, WORKER, plan, patience, secret=secret, lockstep=lockstep, node_timeout_s=timeout_s)
    with (
        _ended_by_signals(),
        contextlib.closing(bind(server.host, server.port)) as sock,
        Deployment(
            config,
            WORKER,
            plan,
            patience,
            secret=secret,
            lockstep=lockstep,
            shares_experts=joint,
            node_timeout_s=timeout_s,
            on_lost=_end_this_process,
        ) as engines,
    ):
        engines.start()
        serve_here = _serve_in_this_process if fleet.num_api_servers == 1 else _serve_in_others
        serve_here(config, server, fleet, engines, sock)
        _ignore_signals()
    return 1 if engines.lost else 0


def _with_keys(server: ServerConfig) -> ServerConfig:
    """With the key of the environment, where none is given. Raises ConfigError for settings that let nobody in, or
    everybody by mistake."""
    access = access_of(server)
    if not access.api_keys and not is_loopback(server.host):
        logger.warning("anybody who reaches %s can use this server: it has no --api-key", server.host)
    return dataclasses.replace(server, api_key=access.api_keys or None)


class _ToldToEnd(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end the body where it is, and what it opened is closed: for the time of start-up, before
    servers have handlers of their own. While things are closed, further ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        _ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else _ToldToEnd

    previous = {number: signal.signal(number, end) for number in _ENDING}
    try:
        with contextlib.suppress(_ToldToEnd):
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """From now on everything is closed, within seconds: whoever cut that short would leave folders and processes."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def _end_this_process() -> None:
    """From any thread: as if somebody else had told it to."""
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_in_this_process(
    config: EngineConfig, server: ServerConfig, fleet: FleetConfig, engines: "Deployment", sock: socket.socket
) -> None:
    """One front end: it is this process, which supervises the engines too."""
    import setproctitle  # deferred: only servers have titles

    from pagemill.front_end import FrontEndBirth, make_fleet, serve_fleet  # deferred: fastapi and uvicorn

    setproctitle.setproctitle("pagemill: api server 0")
    timer = PhaseTimer()
    with timer.phase("tokenizer"):
        tokenizer = tokenizer_of(config.model, config.facts)
    with timer.phase("engine"):
        ups = engines.wait_ready()
    birth = FrontEndBirth(config, server, 0, len(ups), fleet.data_parallel_balancer, engines.secret)
    client = make_fleet(birth, ups)
    engines.subscribe(client.notify)
    _say_ready(config, ups[0].ready, timer)
    serve_fleet(birth, client, tokenizer, sock)
    engines.unsubscribe(client.notify)


def _serve_in_others(
    config: EngineConfig, server: ServerConfig, fleet: FleetConfig, engines: "Deployment", sock: socket.socket
) -> None:
    """Several front ends, in processes of their own on one socket; this process supervises them and the engines."""
    import setproctitle  # deferred: only servers have titles

    from pagemill.api_servers import ApiServers  # deferred, with the next three: zmq, fastapi and uvicorn
    from pagemill.event_feed import EventFeed
    from pagemill.front_end import FrontEndBirth
    from pagemill.observability.metrics_pool import MetricsPool
    from pagemill.serve.http.server import say_ready, url_of

    setproctitle.setproctitle("pagemill: dp coordinator" if fleet.data_parallel_size > 1 else "pagemill: supervisor")
    feed = EventFeed(engines.folder.ipc("feed"), engines.secret)
    pool = MetricsPool(fleet.data_parallel_size, feed.publish)
    for listener in (feed.publish, pool.note):
        engines.subscribe(listener)
    common = (fleet.data_parallel_size, fleet.data_parallel_balancer, engines.secret, feed.address, sock.fileno())
    servers = ApiServers(
        fleet.num_api_servers,
        lambda index: FrontEndBirth(config, server, index, *common),
        sock,
        lambda: list(engines.addresses().values()),
        pool,
        on_lost=_end_this_process,
    )
    timer = PhaseTimer()
    servers.start()
    try:
        with timer.phase("engines"):
            ups = engines.wait_ready()
        with timer.phase("front ends"):
            servers.wait_listening()
        _say_ready(config, ups[0].ready, timer)
        told = _StopSignals()
        say_ready(url_of(sock))
        told.wait()
        servers.stop(server.shutdown_timeout + CLOSING_S, hurry=told.again)
        if servers.lost:
            raise EngineDeadError("no api server is left, and none could be started again")
    finally:
        servers.stop(0.0)
        sock.close()  # from now on nobody answers
        for listener in (feed.publish, pool.note):
            engines.unsubscribe(listener)
        feed.close()


class _StopSignals:
    """The first SIGINT or SIGTERM asks to drain, the second to end at once."""

    def __init__(self) -> None:
        # Not an Event: a handler that interrupts its `wait` at the wrong moment would wait for the lock forever.
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.put(number))

    def wait(self) -> None:
        """For the first one."""
        self._signals.get()

    def again(self) -> bool:
        """Whether another one came since."""
        return not self._signals.empty()


def _shared_secret(plan: FleetPlan) -> str:
    """What the machines of a server share; one machine draws its own. Raises ConfigError when it was not set."""
    if plan.head is None:
        return ""
    secret = envs.ipc_secret()
    if secret is None:
        raise ConfigError(
            "PAGEMILL_IPC_SECRET is not set: the machines of one server need the same secret, of your choice, in it"
        )
    return secret


def _place_threads(
    args: EngineArgs, config: EngineConfig, num_engines: int = 1, *, front_end: bool, own_process: bool = True
) -> EngineConfig:
    """Threads and CPUs of this machine's workers, which share its cores. Where workers run is not known on a cluster,
    nor is there a choice without workers. Raises ConfigError for CPUs that workers cannot have."""
    bind = config.cpu.cpu_threads_bind or AUTO
    if config.parallel.distributed_executor_backend == "ray" or num_engines < 1:
        if parse_lists(bind):
            raise ConfigError(
                f"cpu_threads_bind={bind!r} is for workers on this machine, and Ray, or other machines, have them; "
                "leave it out"
            )
        return dataclasses.replace(config, cpu=dataclasses.replace(config.cpu, cpu_threads_bind=NOBIND))
    workers = num_engines * config.parallel.workers_per_replica
    wish = ThreadWish(bind, args.draft.cpu.cpu_threads, workers, front_end, own_process)
    plan = choose_platform(config.device.device).plan_threads(wish)
    logger.debug("cpu_threads = %d, cpu_threads_bind = %s (%s)", plan.threads, join_lists(plan.cpus), plan.why)
    cpu = dataclasses.replace(config.cpu, cpu_threads=plan.threads, cpu_threads_bind=join_lists(plan.cpus))
    limit, scheduler = config.scheduler.max_prefill_tokens, config.scheduler
    if limit and args.draft.scheduler.max_prefill_tokens is None:  # it was for the threads thought of until here
        limit = limit * plan.threads // (config.cpu.cpu_threads or 1)
        scheduler = dataclasses.replace(scheduler, max_prefill_tokens=limit)
    return dataclasses.replace(config, cpu=cpu, scheduler=scheduler)


def _say_ready(config: EngineConfig, ready: EngineReady, timer: PhaseTimer) -> None:
    logger.info(
        "%s, %s, %d tokens of KV cache, ready: %s",
        config.facts.name,
        config.model.dtype,
        ready.num_blocks * ready.block_size,
        timer.summary(),
    )
