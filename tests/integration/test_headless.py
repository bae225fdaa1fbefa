"""A head and nodes on one machine, as if they were several: scripted engines, and at last the command itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import msgspec
import psutil
import pytest

from pagemill.config.fleet_plan import FleetPlan
from pagemill.fleet.engines import EngineFleet, FleetSpec
from pagemill.utils.processes import Child
from tests.fakes.node_processes import SECRET, TIMEOUT_S, node_payload
from tests.fakes.ports import free_port
from tests.fakes.scripted_fleet import PATIENCE_S, WORKER, FrontEnd, fleet_config
from tests.fakes.tiny_checkpoint import make_checkpoint


class Machines:
    """A head in this process, which has the first of two engines, and nodes."""

    timeout_s = TIMEOUT_S

    def __init__(self, folder, lockstep=False):
        self.folder, self.port, self.lockstep = str(folder), free_port(), lockstep
        self.nodes = []
        plan = FleetPlan(2, range(1), head=("127.0.0.1", self.port), lockstep=lockstep)
        spec = FleetSpec(fleet_config(folder), WORKER, plan, secret=SECRET, node_timeout_s=self.timeout_s)
        self.head = EngineFleet(spec)

    def __enter__(self):
        self.head.start()
        return self

    def __exit__(self, *error):
        self.head.stop()
        for node in self.nodes:
            node.stop(grace_s=10)

    def add_node(self, first=1, count=1, size=2):
        payload = node_payload(
            self.folder,
            self.port,
            first=first,
            count=count,
            size=size,
            lockstep=self.lockstep,
            timeout_s=self.timeout_s,
        )
        self.nodes.append(Child("tests.fakes.node_processes:run_node", "node", payload))
        return self.nodes[-1]

    def steps(self):
        """Per process, the steps it took."""
        return {path.name: path.read_text() for path in self.head.folder.path.parent.glob("[0-9]*")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    return tmp_path


async def test_a_node_goes_and_comes_back_and_ends_with_the_head(folder):
    with Machines(folder) as machines:
        node = machines.add_node()
        async with FrontEnd(machines.head) as front_end:
            assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", machines.head.addresses()[1])
            await front_end.ask("0-here", max_tokens=9)
            await front_end.ask("1-there", max_tokens=9)
            await front_end.answered("0-here", "1-there")
            assert sorted(map(bool, machines.steps().values())) == [True, True], "each engine has worked"

            await front_end.ask("1-moves", max_tokens=500)
            await front_end.until(lambda: front_end.tokens["1-moves"], "a token")
            engines = psutil.Process(node.pid).children()
            os.kill(node.pid, signal.SIGKILL)
            _, alive = psutil.wait_procs(engines, 60)
            assert alive == [], "engines die with their node"
            await front_end.answered("1-moves")
            assert "engine 1 is down" in front_end.client.problem()
            assert front_end.client.accepts()

            again = machines.add_node()
            await front_end.until(lambda: front_end.client.problem() is None, "the return of the node")
            await front_end.ask("1-again", max_tokens=9)
            await front_end.answered("1-again")
        machines.head.stop()
        assert again.wait(60) == 0


async def test_waves_reach_over_machines(folder):
    with Machines(folder, lockstep=True) as machines:
        machines.add_node()
        async with FrontEnd(machines.head) as front_end:
            await front_end.ask("0-here", max_tokens=20)
            await front_end.answered("0-here")
            await front_end.ask("1-there", max_tokens=20)
            await front_end.answered("1-there")
            await front_end.until(
                lambda: (
                    sorted(part.count("r") >= 20 for part in machines.steps().values()) == [True, True]
                    and len({len(part) for part in machines.steps().values()}) == 1
                ),
                "that both took as many steps",
            )


def test_wrong_nodes_end_with_an_error_and_the_head_stays(folder, capfd, caplog):
    with Machines(folder) as machines:
        right, wrong = machines.add_node(), machines.add_node(size=3, count=2)
        assert [up.index for up in machines.head.wait_ready()] == [0, 1]
        late = machines.add_node()
        assert [node.wait(PATIENCE_S) for node in (wrong, late)] == [1, 1]
        assert right.exit_status is None
    log = capfd.readouterr().err
    size = "data_parallel_size is 3 on the node and 2 on the head"
    taken = "engines 1 run on the node .* already"
    assert re.search(f"refused the node .*{size}", caplog.text), "the head says so"
    assert re.search(f"the node .* has to wait: {taken}", caplog.text)
    for problem in (size, taken):
        assert re.search(f"the head refused this node: {problem}", log), "and the node"


def test_a_node_ends_with_a_head_that_is_killed(folder):
    payload = msgspec.json.encode([str(folder), free_port()])
    with Child("tests.fakes.node_processes:run_head", "head", payload) as head:
        port = json.loads(payload)[1]
        node = Child("tests.fakes.node_processes:run_node", "node", node_payload(folder, port, head_return_s=5.0))
        with node:
            assert head.report(PATIENCE_S) == b"ready"
            head.kill()
            assert node.wait(PATIENCE_S) == 1


def serve(*arguments, secret=SECRET, log=subprocess.DEVNULL):
    """A `pagemill serve` process."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment.pop("PAGEMILL_IPC_SECRET", None)
    if secret is not None:
        environment["PAGEMILL_IPC_SECRET"] = secret
    return subprocess.Popen(
        [sys.executable, "-m", "pagemill", "serve", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
    )


def test_the_command_serves_from_two_machines(folder):
    model = make_checkpoint(folder / "model", "LlamaForCausalLM")
    common = [model, "--dtype", "float32", "--cpu-threads", 1, "--num-gpu-blocks-override", 200, "-dp", 2, "-dpl", 1]
    common += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", free_port()]
    log_path = folder / "log"
    with log_path.open("wb") as log:
        balancer = ["--data-parallel-balancer", "round_robin", "--api-server-count", 1, "--port", 0]
        head = serve(*common, *balancer, log=log)
        nodes = [serve(*common, "--headless", "-dpr", 1, log=log)]
        nodes += [serve(*common, "--headless", "-dpr", 1, secret=None, log=log)]
        try:
            assert nodes[1].wait(PATIENCE_S) == 1
            deadline = time.monotonic() + 2 * PATIENCE_S
            while not (found := re.search(r"ready: (http://\S+)", log_path.read_text())):
                assert head.poll() is None, log_path.read_text()
                assert time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.05)
            request = {"model": str(model), "prompt": "abc", "max_tokens": 5, "temperature": 0}
            answers = [httpx.post(f"{found[1]}/v1/completions", json=request, timeout=300).json() for _ in range(4)]
            assert len({answer["choices"][0]["text"] for answer in answers}) == 1, "both engines have the same model"
            titles = {" ".join(p.cmdline()).strip() for p in psutil.Process(nodes[0].pid).children()}
            assert titles == {"pagemill: engine core 1"}
            assert " ".join(psutil.Process(nodes[0].pid).cmdline()).strip() == "pagemill: node (engines 1)"
            head.send_signal(signal.SIGTERM)
            assert head.wait(60) == 0
            assert nodes[0].wait(60) == 0
        finally:
            for process in (head, *nodes):
                process.kill()
                process.wait()
    assert "PAGEMILL_IPC_SECRET is not set" in log_path.read_text()
