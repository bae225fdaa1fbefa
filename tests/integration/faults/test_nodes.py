"""The connection between a head and a node is cut, and the head is started again: nobody's request is lost, and no
engine is started anew for it."""

import asyncio
import json

import psutil
import pytest

from pagemill.messages.fleet import EngineDown, EngineUp
from pagemill.utils.processes import Child
from tests.fakes.node_processes import TIMEOUT_S, node_payload
from tests.fakes.ports import free_port
from tests.fakes.proxy import Proxy
from tests.fakes.scripted_fleet import PATIENCE_S, FrontEnd
from tests.integration.faults.lab import long_only
from tests.integration.test_headless import Machines


class CutMachines(Machines):
    """A head, and a node that reaches it through a proxy."""

    def __enter__(self):
        super().__enter__()
        port = self.port
        self.proxy = Proxy("tcp://127.0.0.1:0", lambda: f"tcp://127.0.0.1:{port}")
        self.port = int(self.proxy.address.rpartition(":")[2])
        self.news = []
        self.head.subscribe(
            lambda event: self.news.append(event) if isinstance(event, (EngineUp, EngineDown)) else None
        )
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self.proxy.__exit__(*error)

    def news_of(self, index):
        return [event for event in self.news if event.index == index]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    return tmp_path


async def many(front_end, count, max_tokens):
    names = [f"{number % 2}-{number}" for number in range(count)]
    for name in names:
        await front_end.ask(name, max_tokens=max_tokens)
    await front_end.until(lambda: all(front_end.tokens[name] for name in names), "a token of each")
    return names


async def test_a_connection_that_is_reset_costs_nobody_anything(folder):
    with CutMachines(folder) as machines:
        node = machines.add_node()
        async with FrontEnd(machines.head) as front_end:
            names = await many(front_end, 32, 200)
            before = machines.proxy.num_connections
            machines.proxy.reset()
            await front_end.until(lambda: machines.proxy.num_connections > before + 1, "another connection")
            await front_end.answered(*names)
            await asyncio.sleep(TIMEOUT_S)
            assert front_end.client.problem() is None
            assert [type(event) for event in machines.news_of(1)] == [EngineUp], "nothing became of its engine"
            # What happens to its engine afterwards is still told.
            (engine,) = psutil.Process(node.pid).children()
            engine.kill()
            await front_end.until(lambda: len(machines.news_of(1)) == 3, "the engine's end and return")
            assert [event.incarnation for event in machines.news_of(1)] == [0, 0, 1]
            await front_end.ask("1-again", max_tokens=9)
            await front_end.answered("1-again")


class HastyMachines(CutMachines):
    """Which give up the other side soon."""

    timeout_s = 2.0


@pytest.mark.parametrize("side", ["client", None, *long_only("server")], ids=["node gone", "silence", "head gone"])
async def test_a_connection_that_is_silent_is_given_up_and_made_anew(folder, side):
    """The head takes the node's engines for gone; the node keeps them, and they are back with it."""
    with HastyMachines(folder) as machines:
        node = machines.add_node()
        async with FrontEnd(machines.head) as front_end:
            engines = psutil.Process(node.pid).children()
            names = await many(front_end, 32, 400)
            if side is None:
                machines.proxy.silence()
                await front_end.until(lambda: front_end.client.problem(), "a word of it")
                assert front_end.client.problem() == "engine 1 is down: its node cannot be reached"
                assert front_end.client.accepts()
                machines.proxy.go_on()
            else:
                machines.proxy.half_open(side)
            await front_end.answered(*names)
            await asyncio.sleep(2 * machines.timeout_s)
            await front_end.until(lambda: front_end.client.problem() is None, "the return of the node")
            await front_end.ask("1-again", max_tokens=9)
            await front_end.answered("1-again")
            assert psutil.Process(node.pid).children() == engines, "the same process, with its model"


def test_a_head_that_is_started_again_has_the_engines_back(folder):
    port = free_port()
    head = json.dumps([str(folder), port]).encode()
    node = Child("tests.fakes.node_processes:run_node", "node", node_payload(folder, port))
    with node:
        engines = []
        for _ in range(2):
            with Child("tests.fakes.node_processes:run_head", "head", head) as first:
                assert first.report(PATIENCE_S) == b"ready", "both engines are up"
                engines.append(psutil.Process(node.pid).children())
                first.kill()
        assert engines[0] == engines[1], "the same process, with its model"
        assert len(engines[0]) == 1
