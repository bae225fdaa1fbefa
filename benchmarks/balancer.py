"""How much of the prompts several engines find in their prefix caches, for each way of choosing between the engines.

    PYTHONPATH=. python benchmarks/balancer.py [--engines 4] [--conversations 96] [--turns 5]

Conversations with a few shared system prompts: each turn sends all that was said before, and a new question. The
engines are real up to their workers, which compute nothing; the hit rate is that of the engines' own counters. Every
policy begins with empty caches and gets the same conversations.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill.bench.scheduler.own import NullWorkers
from pagemill.config.engine_config import EngineConfig
from pagemill.config.facts import ModelFacts
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.fleet import EngineUp
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from pagemill.messages.pending import Ready
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.stats import SchedulerStats
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.serve.client.balancer import BALANCERS, Balancer, EngineLoad
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.inproc import InprocClient
from tests.fakes.configs import cache_config, cpu_config, graph_config, model_config, parallel_config, scheduler_config

BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, ANSWER_TOKEN = 16, 8192, 40_000, 7


class NullWorker:
    """A WorkerApi that computes nothing and always says the same token."""

    runs_ahead = False

    def __init__(self, num_slots: int) -> None:
        self._slots = NullWorkers(num_slots, ANSWER_TOKEN)
        self._outputs: list[ModelRunnerOutput] = []

    def load_model(self) -> None:
        """There is none."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """One layer of full attention."""
        return {"layer": FullAttentionSpec(BLOCK_SIZE, 1, 1, "float32")}

    def available_kv_bytes(self) -> int:
        """Enough: the number of blocks is given."""
        return 1 << 40

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Follow the slots."""
        self._outputs.append(self._slots.run(step))

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Ready[ModelRunnerOutput]:
        """The tokens of the oldest step."""
        return Ready(self._outputs.pop(0))

    def execute_dummy_step(self) -> None:
        """Nothing to run."""

    def shutdown(self) -> None:
        """Nothing to give back."""


class CountedClient(InprocClient):
    """Remembers the last figures of its engine."""

    stats = SchedulerStats()

    async def connected(self) -> None:
        """It is in this process."""

    async def outputs(self) -> list[EngineCoreOutputs]:
        """The next batches."""
        batches = await super().outputs()
        for outputs in batches:
            self.stats = outputs.stats or self.stats
        return batches


class CountedBalancer(Balancer):
    """A balancer, and how often it chose each engine."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.chosen: Counter[int] = Counter()

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        """The engine."""
        engine = self._balancer.choose(request, loads)
        self.chosen[engine] += 1
        return engine

    def forget(self, engine: int) -> None:
        """Its cache is gone."""
        self._balancer.forget(engine)


@dataclass(frozen=True)
class Work:
    """What is asked."""

    engines: int
    conversations: int
    turns: int
    system_prompts: int
    system_tokens: int
    concurrency: int
    blocks: int
    """Of each engine."""
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """What one policy did."""

    policy: str
    hits: int
    queries: int
    seconds: float
    chosen: dict[int, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a cache / prompt tokens."""
        return self.hits / self.queries


def make_core(work: Work) -> EngineCore:
    """An engine."""
    config = EngineConfig(
        model=model_config(max_model_len=MAX_LEN),
        cache=cache_config(block_size=BLOCK_SIZE, num_gpu_blocks_override=work.blocks),
        scheduler=scheduler_config(max_num_batched_tokens=8192),
        parallel=parallel_config(),
        graphs=graph_config(),
        cpu=cpu_config(),
        facts=ModelFacts("null", "", "gguf", "Null", {}, "float32", MAX_LEN, VOCAB_SIZE),
    )
    return EngineCore(config, UniprocExecutor(NullWorker(config.scheduler.max_num_seqs)))


class Talk:
    """All conversations over one fleet."""

    def __init__(self, work: Work, fleet: FleetClient) -> None:
        self._work = work
        self._fleet = fleet
        self._answered: dict[str, asyncio.Event] = {}
        self._room = asyncio.Semaphore(work.concurrency)
        rng = random.Random(work.seed)
        self._systems = [self._words(rng, work.system_tokens) for _ in range(work.system_prompts)]

    async def run(self) -> None:
        """Until every conversation has ended."""
        reader = asyncio.create_task(self._read())
        await asyncio.gather(*(self._converse(number) for number in range(self._work.conversations)))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    async def _converse(self, number: int) -> None:
        rng = random.Random(f"{self._work.seed}-{number}")
        said = list(rng.choice(self._systems))
        async with self._room:
            for turn in range(self._work.turns):
                said += self._words(rng, rng.randrange(20, 120))
                name, num_answer = f"{number}-{turn}", rng.randrange(8, 64)
                params = SamplingParams(max_tokens=num_answer, seed=0)
                answered = self._answered[name] = asyncio.Event()
                await self._fleet.add(
                    EngineCoreRequest(
                        request_id=name, prompt_token_ids=list(said), params=params, arrival_time=time.monotonic()
                    )
                )
                await answered.wait()
                said += [ANSWER_TOKEN] * num_answer

    async def _read(self) -> None:
        while True:
            for outputs in await self._fleet.outputs():
                for output in outputs.outputs:
                    if output.finish is not None:
                        self._answered.pop(output.request_id).set()

    @staticmethod
    def _words(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(100, VOCAB_SIZE) for _ in range(count)]


async def measure(policy: str, work: Work) -> Row:
    """One policy, over engines with empty caches."""
    clients = [CountedClient(make_core(work)) for _ in range(work.engines)]
    ups = [EngineUp(index, 0, "", client.ready) for index, client in enumerate(clients)]
    balancer = CountedBalancer(BALANCERS[policy]())
    fleet = FleetClient(lambda up: clients[up.index], ups, balancer)
    start = time.perf_counter()
    await Talk(work, fleet).run()
    seconds = time.perf_counter() - start
    await fleet.close()
    stats = [client.stats for client in clients]
    hits, queries = sum(one.prefix_cache_hits for one in stats), sum(one.prefix_cache_queries for one in stats)
    return Row(policy, hits, queries, seconds, dict(balancer.chosen))


def report(rows: list[Row], work: Work) -> str:
    """The table."""
    lines = [
        f"{work.engines} engines of {work.blocks * BLOCK_SIZE} tokens, {work.conversations} conversations of "
        f"{work.turns} turns, {work.concurrency} at once, {work.system_prompts} system prompts of "
        f"{work.system_tokens} tokens",
        f"{'policy':<14}{'hit rate':>10}{'computed tokens':>18}{'requests per engine':>26}",
    ]
    for row in rows:
        chosen = ", ".join(str(row.chosen.get(index, 0)) for index in range(work.engines))
        lines.append(f"{row.policy:<14}{row.hit_rate:>10.1%}{row.queries - row.hits:>18,}{chosen:>26}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> Work:
    """The work from flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults: dict[str, Any] = {
        **{"engines": 4, "conversations": 96, "turns": 5, "system_prompts": 12, "system_tokens": 1000},
        **{"concurrency": 24, "blocks": 2500, "seed": 0},
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return Work(**vars(parser.parse_args(argv)))


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure and print; the rows."""
    work = parse(argv)
    rows = [asyncio.run(measure(policy, work)) for policy in BALANCERS]
    print(report(rows, work))
    return rows


if __name__ == "__main__":
    main()
