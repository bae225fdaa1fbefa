"""Two engines in processes of their own that step together: dummy steps, pauses, races and deaths."""

import asyncio
import os
import random
import signal
import time

import msgspec
import pytest

from pagemill.config.fleet_plan import FleetPlan
from pagemill.engine.waves import ROUND_STEPS
from pagemill.fleet.engines import EngineFleet, FleetSpec
from pagemill.messages.fleet import EngineUp
from tests.fakes.proxy import Proxy
from tests.fakes.scripted_fleet import PATIENCE_S, WORKER, FrontEnd, fleet_config

QUIET_S = 0.3
"""A wave that goes on takes many steps in this time."""


class Lab:
    """A deployment of two engines, and the steps that each process has taken."""

    def __init__(self, folder, lockstep=True):
        self.folder = folder
        plan = FleetPlan(2, range(2), lockstep=lockstep)
        self.engines = EngineFleet(FleetSpec(fleet_config(folder), WORKER, plan))

    def __enter__(self):
        self.engines.start()
        self.engines.wait_ready()
        return self

    def __exit__(self, *error):
        self.engines.stop()

    def steps(self, pid):
        path = self.folder / str(pid)
        return path.read_text() if path.exists() else ""

    def all_steps(self):
        return [self.steps(pid) for pid in self.engines.pids()]

    async def paused(self):
        """Until no engine steps; the steps of each so far."""
        deadline = time.monotonic() + PATIENCE_S
        before = None
        while before != (now := self.all_steps()):
            assert time.monotonic() < deadline, "they do not pause"
            before = now
            await asyncio.sleep(QUIET_S)
        return now


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    with Lab(tmp_path) as lab:
        yield lab


async def test_idle_engines_step_while_one_has_work_and_all_pause_together(lab):
    async with FrontEnd(lab.engines) as front_end:
        assert await lab.paused() == ["", ""], "nothing is run before the first request"
        await front_end.ask("0-first", max_tokens=40)
        await front_end.answered("0-first")
        busy, idle = await lab.paused()
        assert busy.count("r") >= 40
        assert set(idle) == {"d"}
        assert len(busy) == len(idle)
        assert len(busy) % ROUND_STEPS == 0
        # A request at a paused engine starts the other one as well.
        await front_end.ask("1-second", max_tokens=20)
        await front_end.answered("1-second")
        steps = await lab.paused()
        assert len(steps[0]) == len(steps[1]) > len(busy)
        assert set(steps[0][len(busy) :]) == {"d"}
        assert steps[1].count("r") >= 20
        # Requests at both at once.
        await asyncio.gather(front_end.ask("0-third", max_tokens=9), front_end.ask("1-fourth", max_tokens=30))
        await front_end.answered("0-third", "1-fourth")
        assert len({len(part) for part in await lab.paused()}) == 1


async def test_requests_that_race_with_the_end_of_a_wave_are_not_lost(lab):
    rng = random.Random(7)
    async with FrontEnd(lab.engines) as front_end:
        for number in range(30):
            name = f"{rng.randrange(2)}-{number}"
            await front_end.ask(name, max_tokens=rng.randrange(1, 6))
            if rng.random() < 0.8:
                await front_end.answered(name)
            # A wave ends one to two rounds after the last token.
            await asyncio.sleep(rng.uniform(0, 3 * ROUND_STEPS * 0.003))
        await front_end.answered(*front_end.requests)
        assert len({len(part) for part in await lab.paused()}) == 1


async def test_an_engine_that_dies_comes_back_into_the_wave(lab):
    async with FrontEnd(lab.engines) as front_end:
        await front_end.ask("0-long", max_tokens=900)
        await front_end.until(lambda: lab.all_steps()[1], "a dummy step")
        idle = lab.engines.pids()[1]
        os.kill(idle, signal.SIGKILL)
        await front_end.until(lambda: lab.engines.pids()[1] != idle, "a new process")
        await front_end.until(lambda: lab.all_steps()[1], "a dummy step of it")
        assert "0-long" not in front_end.finish, "the wave went on meanwhile"
        # And the one with the work: it goes on with the other.
        os.kill(lab.engines.pids()[0], signal.SIGKILL)
        await front_end.answered("0-long")
        await front_end.until(lambda: len(lab.engines.addresses()) == 2, "the restart")
        await lab.paused()
        for name in ("0-after", "1-after"):
            before = [len(part) for part in lab.all_steps()]
            await front_end.ask(name, max_tokens=5)
            await front_end.answered(name)
            after = [len(part) for part in await lab.paused()]
            assert after[0] - before[0] == after[1] - before[1] > 0


async def test_engines_that_need_no_waves_have_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    with Lab(tmp_path, lockstep=False) as lab:
        async with FrontEnd(lab.engines) as front_end:
            await front_end.ask("0-first", max_tokens=5)
            await front_end.answered("0-first")
            assert [set(part) for part in await lab.paused()] == [{"r"}, set()]


@pytest.mark.parametrize("cut", ["reset", "silence"])
async def test_engines_that_the_coordinator_cannot_reach_for_a_while_still_pause_together(tmp_path, monkeypatch, cut):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    lab = Lab(tmp_path)
    tell, addresses = lab.engines._coordinator.notify, []
    with Proxy(lab.engines.folder.ipc("proxy"), lambda: addresses[0]) as proxy:

        def tell_of_the_proxy(event):
            if isinstance(event, EngineUp) and event.index == 1:
                addresses.insert(0, event.address)
                event = msgspec.structs.replace(event, address=proxy.address)
            tell(event)

        lab.engines._listeners[:] = [tell_of_the_proxy]
        with lab:
            async with FrontEnd(lab.engines) as front_end:
                for number in range(3):
                    await front_end.ask(f"0-{number}", max_tokens=400)
                    await front_end.ask(f"1-{number}", max_tokens=200)
                    await front_end.until(lambda n=number: len(front_end.tokens[f"1-{n}"]) > 20, "tokens")
                    if cut == "reset":
                        proxy.reset()
                    else:
                        proxy.silence()
                        await asyncio.sleep(1.0)
                        proxy.go_on()
                    await front_end.answered(f"0-{number}", f"1-{number}")
                assert len({len(part) for part in await lab.paused()}) == 1
                assert len(set(lab.engines.addresses().values())) == 2
            assert proxy.num_connections > (3 if cut == "reset" else 0)
