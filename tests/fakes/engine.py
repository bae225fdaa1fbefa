"""An `AsyncLLM` on a fake core, an app around it, and a real server on a free port."""

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI

from pagemill.catalog.endpoints import ENDPOINTS
from pagemill.catalog.registry import Registry
from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerConfig
from pagemill.config.server_config import ServerConfig
from pagemill.messages.core_api import CoreApi
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.serve.http.app import build_app
from pagemill.serve.http.limits import limits_of
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.server import HttpServer, bind, bind_unix
from pagemill.serve.http.tls import Tls
from tests.fakes.configs import cache_config, scheduler_config
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import IM_END, VOCAB_SIZE, ByteTokenizer

FACTS = ModelFacts(
    name="fake",
    path="/nowhere/fake",
    weights_format="safetensors",
    architecture="FakeForCausalLM",
    hf_config={"hidden_size": 8},
    dtype="float32",
    max_position=256,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(IM_END,),
)


def make_engine(
    core: FakeCore | None = None,
    log_interval_s: float | None = None,
    pooler: PoolerConfig | None = None,
    log_stats: bool = True,
    facts: ModelFacts | None = None,
    make_client: Callable[[CoreApi], InprocClient] = InprocClient,
    **scheduler: Any,
) -> AsyncLLM:
    """An engine on a fake core; further keywords are fields of SchedulerConfig. `facts`: None stands for `FACTS`."""
    client = make_client(core or FakeCore())
    return AsyncLLM(
        client,
        ByteTokenizer(),
        facts or FACTS,
        scheduler_config(**({"max_num_batched_tokens": client.ready.max_model_len} | scheduler)),
        cache=cache_config(),
        log_interval_s=log_interval_s,
        pooler=pooler,
        log_stats=log_stats,
    )


def endpoints() -> Registry[Any]:
    """The catalogue, as far as its modules exist."""
    known = {name: ENDPOINTS._paths[name] for name in ENDPOINTS}
    return Registry(
        "endpoint", {name: path for name, path in known.items() if importlib.util.find_spec(path.partition(":")[0])}
    )


def make_app(engine: AsyncLLM, **server: Any) -> FastAPI:
    """The app around an engine; keywords are fields of ServerConfig."""
    return build_app(engine, ServerConfig(**server), endpoints())


@contextlib.contextmanager
def running_server(
    core: FakeCore, scheduler: dict[str, Any] | None = None, helpers: PreparerPool | None = None, **server: Any
) -> Iterator[str]:
    """A real HTTP server in a thread; yields its URL."""
    engine = make_engine(core, **(scheduler or {}))
    app = build_app(engine, ServerConfig(**server), endpoints(), helpers=helpers)
    limits = limits_of(ServerConfig(**server))
    config = ServerConfig(**server)
    sock = bind_unix(config.uds) if config.uds else bind("127.0.0.1", 0)
    http = HttpServer(app, sock, limits=limits, tls=Tls.of(config))
    thread = threading.Thread(target=http.run_until_stopped)
    thread.start()
    try:
        wait_until(lambda: http.started)
        yield http.url
    finally:
        http.should_exit = True
        thread.join(60)


def wait_until(condition: Any, timeout_s: float = 60) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.005)
