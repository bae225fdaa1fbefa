"""One engine of benchmarks/gpu.py in a process of its own: starts it, does the works asked for, and prints figures.

Usage: python gpu_engine.py JOB, a JSON object (see `Job`). Every answer is one JSON line on stdout:
{"work": NAME, "figures": {...}} or {"work": NAME, "error": TEXT}. What the engine prints goes to stderr. Both engines
offer `LLM` and `SamplingParams` with the same names, so that the works are the same code for both.
"""

import dataclasses
import importlib
import itertools
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRESS_SEED = 7


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do."""

    package: str
    """pagemill, or vllm."""
    model: str
    settings: dict[str, Any]
    works: list[str]
    born_s: float
    """time.time() when this process was asked for."""
    folder: str
    """Where larger results go, such as profiles."""


FIXED = {"ignore_eos": True, "detokenize": False}
"""Sampling parameters of every request."""


class Bench:
    """A running engine, and prompts that nobody has seen before."""

    def __init__(self, job: Job) -> None:
        self.job = job
        package = importlib.import_module(job.package)
        self._params = package.SamplingParams
        self.import_s = time.time() - job.born_s
        start_s = time.time()
        self.llm = package.LLM(model=job.model, **job.settings)
        self.init_s = time.time() - start_s
        config = json.loads((Path(job.model) / "config.json").read_text())
        self._vocab_size = int(config["vocab_size"]) - 1000
        self._seeds = itertools.count(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` random tokens; no two calls share any."""
        rng = random.Random(next(self._seeds))
        return [[rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]

    def seconds(self, prompts: list[list[int]], num_tokens: int, **sampling: Any) -> float:
        """Time to generate exactly `num_tokens` for each prompt, greedily unless told otherwise."""
        params = self._params(**({"temperature": 0.0} | sampling), max_tokens=num_tokens, **FIXED)
        return self._run(prompts, [params] * len(prompts))

    def mixed(self, prompts: list[list[int]], samplings: list[dict[str, Any]]) -> float:
        """Time to generate with parameters of each prompt's own."""
        return self._run(prompts, [self._params(**sampling, **FIXED) for sampling in samplings])

    def _run(self, prompts: list[list[int]], params: list[Any]) -> float:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        for output, param in zip(outputs, params, strict=True):
            if len(output.outputs[0].token_ids) != param.max_tokens:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens instead of {param.max_tokens}")
        return elapsed_s


Figures = dict[str, Any]


def smoke(bench: Bench) -> Figures:
    """A few seconds that show that everything works: one request, then eight."""
    first_s = statistics.median(bench.seconds(bench.prompts(1, 64), 1) for _ in range(3))
    whole_s = bench.seconds(bench.prompts(1, 64), 64)
    eight_s = bench.seconds(bench.prompts(8, 64), 32)
    return {
        "decode_tokens_per_s": 63 / (whole_s - first_s),
        "first_token_ms": first_s * 1e3,
        "output_tokens_per_s_8": 8 * 32 / eight_s,
    }


def first_token(bench: Bench) -> Figures:
    """Time of one prompt and one token."""
    short = [bench.seconds(bench.prompts(1, 128), 1) for _ in range(9)]
    long = [bench.seconds(bench.prompts(1, 2048), 1) for _ in range(5)]
    return {
        "first_token_128_ms": statistics.median(short) * 1e3,
        "first_token_2048_ms": statistics.median(long) * 1e3,
        "all_128_ms": [each * 1e3 for each in short],
    }


def first_token_long(bench: Bench) -> Figures:
    """Time of one long prompt and one token, the median of three."""
    figures = {}
    for length in (8192, 16384):
        figures[f"first_token_{length}_ms"] = 1e3 * statistics.median(
            bench.seconds(bench.prompts(1, length), 1) for _ in range(3)
        )
    return figures


def long_prompts(bench: Bench, count: int, length: int) -> Figures:
    """`count` requests at once of `length` tokens, 128 out; the better of two."""
    best_s = min(bench.seconds(bench.prompts(count, length), 128) for _ in range(2))
    return {"output_tokens_per_s": count * 128 / best_s, "whole_s": best_s}


def single(bench: Bench) -> Figures:
    """One stream: 128 tokens in, 256 out; the rate is that of the tokens after the first."""
    first_s = statistics.median(bench.seconds(bench.prompts(1, 128), 1) for _ in range(5))
    whole = sorted(bench.seconds(bench.prompts(1, 128), 256) for _ in range(3))
    return {"decode_tokens_per_s": 255 / (whole[1] - first_s), "first_token_ms": first_s * 1e3, "all_s": whole}


def few(bench: Bench) -> Figures:
    """8, 32 and 64 requests at once, 512 in, 256 out; the better of two."""
    figures = {}
    for count in (8, 32, 64):
        best_s = min(bench.seconds(bench.prompts(count, 512), 256) for _ in range(2))
        figures[f"output_tokens_per_s_{count}"] = count * 256 / best_s
    return figures


def many_256(bench: Bench) -> Figures:
    """256 requests at once, 512 in, 256 out; the best of three: shapes of steps warm up in the first, and what is not
    captured by then is in the second."""
    all_s = [bench.seconds(bench.prompts(256, 512), 256) for _ in range(3)]
    return {"output_tokens_per_s": 256 * 256 / min(all_s), "all_s": all_s}


def sampled_256(bench: Bench) -> Figures:
    """The same with top-k 50 and top-p 0.95, in turn with greedy decoding; the best of three, as sizes of batches are
    captured meanwhile."""
    greedy_s, sampled_s = [], []
    for _ in range(3):
        greedy_s.append(bench.seconds(bench.prompts(256, 512), 256))
        sampled_s.append(bench.seconds(bench.prompts(256, 512), 256, temperature=0.8, top_p=0.95, top_k=50))
    return {
        "output_tokens_per_s": 256 * 256 / min(sampled_s),
        "share_of_greedy": min(greedy_s) / min(sampled_s),
        "all_s": sampled_s,
        "greedy_s": greedy_s,
    }


def seeded_256(bench: Bench) -> Figures:
    """256 requests, 512 in, 128 out, in turn greedy and by parameters: each of them at all requests, then a mix of
    all. The share of greedy decoding that each reaches; the better of two."""
    seeded = {"temperature": 0.8, "seed": 7}
    asked: dict[str, list[dict[str, Any]]] = {
        "greedy": [{"temperature": 0.0}],
        "temperature": [seeded],
        "top_p": [seeded | {"top_p": 0.9}],
        "top_k_top_p": [seeded | {"top_k": 50, "top_p": 0.95}],
        "min_p": [seeded | {"min_p": 0.05}],
    }
    asked["mix"] = [each for params in asked.values() for each in params]
    seconds: dict[str, float] = {}
    for _ in range(2):
        for name, params in asked.items():
            prompts = bench.prompts(256, 512)
            bench.seconds(prompts, 1)  # the cache has them: what follows is decoding
            given = [params[index % len(params)] | {"max_tokens": 128} for index in range(256)]
            seconds[name] = min(seconds.get(name, float("inf")), bench.mixed(prompts, given))
    figures = {f"share_{name}": seconds["greedy"] / each for name, each in seconds.items()}
    return figures | {"least_share": min(figures.values()), "all_s": seconds}


def chats(rng: random.Random, bench: Bench) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """200 requests of log-normal lengths, half of them sampled."""
    prompts, samplings = [], []
    for index in range(200):
        prompts.append(bench.prompts(1, min(3000, max(8, int(rng.lognormvariate(5.5, 0.9)))))[0])
        sampling: dict[str, Any] = (
            {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": index}
        )
        samplings.append(sampling | {"max_tokens": min(800, max(4, int(rng.lognormvariate(5.0, 0.8))))})
    return prompts, samplings


def twice(bench: Bench, work: Callable[[], tuple[list[list[int]], list[dict[str, Any]]]]) -> Figures:
    """The same work twice in a fresh process, other token ids the second time: whether the first had to wait for what
    the second found."""
    seconds = []
    for _ in range(2):
        bench.llm.reset_prefix_cache()
        seconds.append(bench.mixed(*work()))
    return {"first_s": seconds[0], "second_s": seconds[1], "second_of_first": seconds[1] / seconds[0]}


def same_length(bench: Bench, count: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """As many requests, 512 in, 256 out, greedy."""
    return bench.prompts(count, 512), [{"temperature": 0.0, "max_tokens": 256}] * count


def prefill(bench: Bench) -> Figures:
    """256 prompts of 512 tokens, one token out; the better of three."""
    all_s = [bench.seconds(bench.prompts(256, 512), 1) for _ in range(3)]
    return {"prompt_tokens_per_s": 256 * 512 / min(all_s), "all_s": all_s}


def many_1024(bench: Bench) -> Figures:
    """1,024 requests at once, 512 in, 128 out."""
    whole_s = bench.seconds(bench.prompts(1024, 512), 128)
    return {"output_tokens_per_s": 1024 * 128 / whole_s, "whole_s": whole_s}


def busy(bench: Bench, count: int, num_tokens: int) -> Figures:
    """The GPU's timeline while `count` requests of 512 tokens decode: their prompts are in the prefix cache, so that
    nearly all of the time is steady decoding."""
    from pagemill.bench.gpu_timeline import gpu_table, read_trace, summarize_gpu
    from pagemill.bench.profiling import gpu_trace

    prompts = bench.prompts(count, 512)
    bench.seconds(prompts, 1)
    plain_s = bench.seconds(prompts, num_tokens)
    path = Path(bench.job.folder) / f"trace-{Path(bench.job.model).name}-{count}.json.gz"
    with gpu_trace(path):
        profiled_s = bench.seconds(prompts, num_tokens)
    timeline = summarize_gpu(read_trace(path), window=(0.4, 0.95))
    if timeline is None:
        raise RuntimeError(f"{path} shows no work of the GPU")
    path.with_suffix("").with_suffix(".txt").write_text(gpu_table(timeline) + "\n")
    return {
        "busy_share": timeline.busy_share,
        "step_ms": plain_s / num_tokens * 1e3,
        "profiled_step_ms": profiled_s / num_tokens * 1e3,
        "gaps_ms": timeline.gaps_ms,
        "longest_gap_ms": timeline.longest_gap_ms,
        "kernels": [dataclasses.asdict(kernel) for kernel in timeline.kernels[:16]],
    }


def memory(bench: Bench) -> Figures:
    """What this process and everything else holds of the GPU's memory by now, beside the budget of our engine."""
    import torch

    free, total = torch.cuda.mem_get_info()
    share = bench.llm.config.cache.gpu_memory_utilization
    return {
        "peak_share_of_budget": (total - free) / (total * share),
        "used_gib": (total - free) / 2**30,
        "budget_gib": total * share / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def stress(bench: Bench) -> Figures:
    """600 requests of very different lengths and parameters, many of them long: the steps are as large as they get."""
    rng = random.Random(STRESS_SEED)
    lengths = [rng.choice((1, 17, 512, 2000, 3500)) for _ in range(600)]
    prompts = [bench.prompts(1, length)[0] for length in lengths]
    samplings: list[dict[str, Any]] = []
    for index in range(len(prompts)):
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(1, 400)}
        if index % 2:
            sampling |= {"temperature": 1.0, "top_k": rng.choice((0, 1, 50, 1000)), "top_p": rng.uniform(0.1, 1.0)}
        if index % 5 == 1:
            sampling |= {"min_p": 0.05, "seed": index}
        samplings.append(sampling)
    elapsed_s = bench.mixed(prompts, samplings)
    return {"num_finished": len(prompts), "whole_s": elapsed_s}


WORKS: dict[str, Callable[[Bench], Figures]] = {
    "smoke": smoke,
    "first_token": first_token,
    "first_token_long": first_token_long,
    "long_4k": lambda bench: long_prompts(bench, 48, 4096),
    "long_16k": lambda bench: long_prompts(bench, 8, 16000),
    "single": single,
    "few": few,
    "many_256": many_256,
    "sampled_256": sampled_256,
    "seeded_256": seeded_256,
    "twice_16": lambda bench: twice(bench, lambda: same_length(bench, 16)),
    "twice_chats": lambda bench: twice(bench, lambda: chats(random.Random(3), bench)),
    "prefill": prefill,
    "many_1024": many_1024,
    "busy_1": lambda bench: busy(bench, 1, 128),
    "busy_256": lambda bench: busy(bench, 256, 96),
    "busy_1024": lambda bench: busy(bench, 1024, 48),
    "memory": memory,
    "stress": stress,
}


def run_job(job: Job, answer: Callable[[dict[str, Any]], None]) -> int:
    """Start the engine, do the works; an error ends the work it came in. 1 when there was any."""
    num_failed = 0

    def attempt(name: str, work: Callable[[], Figures]) -> bool:
        nonlocal num_failed
        try:
            figures = work()
        except Exception as error:
            traceback.print_exc()
            num_failed += 1
            answer({"work": name, "error": f"{type(error).__name__}: {error}"[:400]})
            return False
        answer({"work": name, "figures": figures})
        return True

    started: list[Bench] = []

    def start() -> Figures:
        bench = Bench(job)
        started.append(bench)
        bench.seconds(bench.prompts(1, 128), 1)
        figures = {"import_s": bench.import_s, "init_s": bench.init_s, "first_token_s": time.time() - job.born_s}
        bench.seconds(bench.prompts(1, 128), 8)
        return figures

    if not attempt("start", start):
        return 1
    for name in job.works:
        attempt(name, lambda name=name: WORKS[name](started[0]))
    return 1 if num_failed else 0


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.exit(run_job(job, lambda result: print(json.dumps(result), file=answers)))


if __name__ == "__main__":
    main()
