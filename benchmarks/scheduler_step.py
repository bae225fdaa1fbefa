"""Cost of the scheduler alone: schedule() + update() per step, with a model that does nothing.

    PYTHONPATH=. python benchmarks/scheduler_step.py [--steps N]

Rows: steady decodes (blocks of 16, prefix caching on), the same without prefix caching, and admission of a long
prompt, new and fully cached.
"""

import argparse
import time
from statistics import mean, median

import numpy as np

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
NUM_BLOCKS = 131_072
MAX_MODEL_LEN = 65_536
TOKEN = 7


class NullWorkers:
    """Samples the same token for every slot whose prompt is complete; follows the slots as a worker does."""

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The tokens of a step."""
        for new in step.new:
            self._known[new.slot], self._computed[new.slot] = len(new.token_ids), new.num_computed_tokens
        self._computed[step.slots] += step.num_tokens
        slots = step.slots[self._computed[step.slots] == self._known[step.slots]]
        self._known[slots] += 1
        return ModelRunnerOutput(step.step_id, slots, np.full(len(slots), TOKEN, np.int32))


def make_scheduler(num_slots: int, *, caching: bool = True, budget: int = 65_536) -> Scheduler:
    """A scheduler over one group of full attention."""
    spec = FullAttentionSpec(BLOCK_SIZE, 8, 128, "bfloat16")
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(("layer",), spec),))
    limits = SchedulerLimits(budget, num_slots, MAX_MODEL_LEN)
    return Scheduler(limits, KVCacheManager(config, "sha256" if caching else None))


def request(name: str, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
    """A request with two stop ids, neither of which is sampled."""
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=(1, 2))
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0)


def run_step(scheduler: Scheduler, workers: NullWorkers) -> float:
    """One step; seconds spent in the scheduler."""
    start = time.perf_counter()
    step = scheduler.schedule()
    scheduled = time.perf_counter()
    if step is None:
        raise RuntimeError("nothing to run")
    output = workers.run(step)
    sampled = time.perf_counter()
    scheduler.update(output)
    return scheduled - start + time.perf_counter() - sampled


def steady(num_decodes: int, num_steps: int, *, caching: bool) -> list[float]:
    """Seconds per step while `num_decodes` requests decode; prompts of different length, as in service."""
    scheduler, workers = make_scheduler(num_decodes, caching=caching), NullWorkers(num_decodes)
    for index in range(num_decodes):
        scheduler.add(request(f"request-{index}", [index, *range(3, 20 + index % BLOCK_SIZE)], 10 * num_steps))
    for _ in range(4):
        run_step(scheduler, workers)
    return [run_step(scheduler, workers) for _ in range(num_steps)]


def admission(num_tokens: int) -> tuple[float, float]:
    """Seconds of the step that admits a prompt of `num_tokens` tokens: new, and fully cached."""
    scheduler, workers = make_scheduler(2), NullWorkers(2)
    prompt = np.random.default_rng(0).integers(3, 100_000, num_tokens).tolist()
    seconds = []
    for name in ("new", "cached"):
        scheduler.add(request(name, prompt, 1))
        seconds.append(run_step(scheduler, workers))
    return seconds[0], seconds[1]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="measured steps per row")
    args = parser.parse_args()
    print(f"{'case':<34}{'mean':>10}{'median':>10}{'p99':>10}   (schedule + update, us per step)")
    for num_decodes in (1, 16, 256, 1024):
        for caching in (True, False):
            times = sorted(second * 1e6 for second in steady(num_decodes, args.steps, caching=caching))
            name = f"{num_decodes} decodes{'' if caching else ', no prefix caching'}"
            print(f"{name:<34}{mean(times):>10.0f}{median(times):>10.0f}{times[len(times) * 99 // 100]:>10.0f}")
    new, cached = admission(32_768)
    print(
        f"{'admit 32,768 tokens, new':<34}{new * 1e6:>10.0f}\n{'admit 32,768 tokens, cached':<34}{cached * 1e6:>10.0f}"
    )


if __name__ == "__main__":
    main()
