"""What the processes cost: the hop over ZMQ, the event loop under many streams, idleness, the end, ranks.

    python benchmarks/process_costs.py --all --output-json costs.json
    python benchmarks/process_costs.py --only hop

hop    CPU seconds per token of the same requests through an engine in this process and through one behind ZMQ,
       interleaved; medians and the median of the ratios of the pairs
lag    1,000 streams over HTTP on a tiny model: how late the server's event loop runs a timer
idle   CPU time of the whole tree of `pagemill serve` while nobody asks
stop   from Ctrl-C to the end of the last process
ranks  resident memory of one worker with tensor parallel sizes 1 and 2, beyond what a worker without weights takes
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from ready_server import wait_ready

MODEL = "smollm2"
NUM_PAIRS, NUM_REQUESTS, NUM_TOKENS = 15, 16, 64
NUM_STREAMS, STREAM_TOKENS = 1000, 100
IDLE_S = 20.0
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

BIG = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
BIG |= {"num_key_value_heads": 4}


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """User and system time of a tree so far."""
    return sum(sum(process.cpu_times()[:2]) for process in tree(pid))


@contextmanager
def served(*arguments: str, module: str = "pagemill") -> "Iterator[tuple[subprocess.Popen[bytes], str]]":
    """A server and its address."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", *arguments, "--port", "0"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            yield process, f"http://127.0.0.1:{wait_ready(process, log)}"
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


async def _generate(llm: Any) -> int:
    """The same requests each time, with prompts of their own; tokens made."""
    from pagemill import SamplingParams

    async def one(number: int) -> int:
        prompt = {"prompt_token_ids": [100 + (number * 37 + index) % 5000 for index in range(32)]}
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        last = None
        async for output in llm.generate(prompt, params, f"r{number}-{time.monotonic_ns()}"):
            last = output
        assert last is not None
        return len(last.outputs[0].token_ids)

    return sum(await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS))))


async def _cost(llm: Any) -> float:
    """CPU seconds per token, of this process and its children."""
    before = cpu_seconds(os.getpid())
    tokens = await _generate(llm)
    return (cpu_seconds(os.getpid()) - before) / tokens


def hop() -> dict[str, Any]:
    """In this process against over ZMQ."""
    from pagemill import launch
    from pagemill.config.arguments import EngineArgs
    from pagemill.config.fleet_config import FleetConfig
    from pagemill.config.fleet_plan import plan_fleet
    from pagemill.config.server_config import ServerConfig
    from pagemill.fleet.api_server import ApiServerSpec, make_fleet
    from pagemill.fleet.engines import EngineFleet, FleetSpec
    from pagemill.fleet.supervisor import LivenessTimeouts
    from pagemill.serve.async_llm import AsyncLLM
    from pagemill.tokenizers.load import tokenizer_of

    config = launch.build_config(EngineArgs(model=MODEL, enable_prefix_caching=False))
    fleet = FleetConfig()

    async def measure() -> list[tuple[float, float]]:
        local = launch.start_inproc(config).llm
        with EngineFleet(FleetSpec(config, launch.WORKER, plan_fleet(fleet), LivenessTimeouts(60, 60))) as engines:
            engines.start()
            ups = engines.wait_ready()
            spec = ApiServerSpec(config, ServerConfig(), 0, 1, fleet.data_parallel_balancer, engines.secret)
            client = make_fleet(spec, ups)
            remote = AsyncLLM(
                client, tokenizer_of(config.model, config.facts), config.facts, config.scheduler, cache=config.cache
            )
            await _generate(local)
            await _generate(remote)
            pairs = [(await _cost(local), await _cost(remote)) for _ in range(NUM_PAIRS)]
            await remote.shutdown()
        await local.shutdown()
        return pairs

    pairs = asyncio.run(measure())
    here, there = (statistics.median(costs) for costs in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return {"in_process_ms_per_token": here * 1e3, "zmq_ms_per_token": there * 1e3, "ratio": ratio, "pairs": len(pairs)}


def lag() -> dict[str, Any]:
    """Event-loop lag of the front end under NUM_STREAMS streams."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        arguments = (folder, "--tokenizer", MODEL, "--load-format", "dummy", "--max-num-seqs", "1024")
        with served(*arguments, "--max-model-len", "512", module="benchmarks.process_costs") as (_, url):
            return asyncio.run(_many_streams(url))


async def _many_streams(url: str) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(number: int) -> int:
            prompt = [100 + (number * 37 + index) % 5000 for index in range(16)]
            body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
            num_events = 0
            async with client.stream("POST", url + "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for chunk in response.aiter_raw():
                    num_events += chunk.count(b"data: {")
            return num_events

        await one(0)
        await client.get(url + "/lag")
        start = time.perf_counter()
        events = sum(await asyncio.gather(*(one(number) for number in range(NUM_STREAMS))))
        seconds = time.perf_counter() - start
        late = (await client.get(url + "/lag")).json()
    tokens = NUM_STREAMS * STREAM_TOKENS
    return {**late, "streams": NUM_STREAMS, "tokens_per_s": tokens / seconds, "events": events}


def idle() -> dict[str, Any]:
    """Share of one core that an idle server takes."""
    with served(MODEL) as (process, url):
        body = {"prompt": "Once", "max_tokens": 8}
        httpx.post(url + "/v1/completions", json=body, timeout=60).raise_for_status()
        time.sleep(3)
        before = cpu_seconds(process.pid)
        time.sleep(IDLE_S)
        share = (cpu_seconds(process.pid) - before) / IDLE_S
        return {"percent_of_one_core": 100 * share, "processes": len(tree(process.pid))}


def stop() -> dict[str, Any]:
    """Ctrl-C in a terminal, for two layouts of processes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        common = (folder, "--tokenizer", MODEL, "--load-format", "dummy", "--max-model-len", "512")
        for name, arguments in {"one": (), "tp2 dp2 asc2": ("-tp", "2", "-dp", "2", "-asc", "2")}.items():
            with served(*common, *arguments) as (process, _):
                processes = tree(process.pid)
                start = time.perf_counter()
                os.killpg(process.pid, signal.SIGINT)
                process.wait()
                _, alive = psutil.wait_procs(processes[1:], 10)
                found[name] = {"s": time.perf_counter() - start, "processes": len(processes), "left": len(alive)}
    return found


def ranks() -> dict[str, Any]:
    """Resident memory of worker 0, weights in bfloat16, against that of a worker of a model with next to none."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("empty", TINY), ("whole", TINY | BIG), ("half", TINY | BIG)):
            Path(folder, "config.json").write_text(json.dumps(size))
            arguments = [
                "--tokenizer",
                MODEL,
                "--load-format",
                "dummy",
                "--dtype",
                "bfloat16",
                "--max-model-len",
                "512",
            ]
            arguments += ["--distributed-executor-backend", "mp", "-tp", "2" if name == "half" else "1"]
            arguments += ["--kv-cache-memory-bytes", str(64 << 20)]
            with served(folder, *arguments) as (process, url):
                body = {"prompt": "Once", "max_tokens": 8}
                httpx.post(url + "/v1/completions", json=body, timeout=60).raise_for_status()
                worker = next(p for p in tree(process.pid) if "worker 0" in " ".join(p.cmdline()))
                found[name + "_mb"] = worker.memory_full_info().uss / 1e6
    found["ratio"] = (found["half_mb"] - found["empty_mb"]) / (found["whole_mb"] - found["empty_mb"])
    return found


ROWS: dict[str, Callable[[], dict[str, Any]]] = {"hop": hop, "lag": lag, "idle": idle, "stop": stop, "ranks": ranks}


def _install_lag_route() -> None:
    """`GET /lag`: how late a timer of 5 ms was since the last call, in milliseconds."""
    from fastapi import APIRouter

    from pagemill.catalog.endpoints import ENDPOINTS

    router, late = APIRouter(), []
    started: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(1e3 * (time.perf_counter() - start - 0.005))

    @router.get("/lag")
    async def report() -> dict[str, float]:
        if not started:
            started.append(asyncio.create_task(watch()))
        found = sorted(late) or [0.0]
        late.clear()
        return {f"p{share}_ms": found[len(found) * share // 100] for share in (50, 99)} | {"max_ms": found[-1]}

    sys.modules[__name__].router = router  # type: ignore[attr-defined]
    ENDPOINTS.add("lag", f"{__name__}:router")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", choices=list(ROWS), default=[])
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for name in list(ROWS) if arguments.all else arguments.only:
        rows[name] = ROWS[name]()
        print(name, json.dumps(rows[name]), flush=True)
    if arguments.output_json:
        arguments.output_json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        import benchmarks.process_costs as module  # as a module, so that it is the one that others import
        from pagemill.cli.main import main as command

        module._install_lag_route()
        sys.exit(command())
    main()
