"""What the prefix cache saves: requests that share a system prompt, with the cache and without it, interleaved.

    PYTHONPATH=. python benchmarks/prefix_cache.py [--requests 50] [--shared 1000] [--repetitions 3]

Every repetition begins with an empty cache and runs the requests twice: all at once (how long until the last is
done), and one after the other (how long each takes to its first token, with one token of output).
"""

import argparse
import random
import time
from statistics import median

from pagemill import LLM, SamplingParams

NUM_OWN, NUM_OUT = 32, 32


def make_prompts(num_requests: int, num_shared: int, seed: int) -> list[list[int]]:
    """Token ids: the shared prompt, then each request's own tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, 40_000) for _ in range(num_shared)]
    return [shared + [rng.randrange(100, 40_000) for _ in range(NUM_OWN)] for _ in range(num_requests)]


def run(llm: LLM, prompts: list[list[int]]) -> dict[str, float]:
    """One repetition."""
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    together_s = time.perf_counter() - start
    llm.reset_prefix_cache()
    first_s = []
    for prompt in prompts:
        start = time.perf_counter()
        llm.generate([prompt], greedy.replace(max_tokens=1), use_tqdm=False)
        first_s.append(time.perf_counter() - start)
    num_tokens = sum(map(len, prompts))
    return {
        "together_s": together_s,
        "cached": sum(output.num_cached_tokens or 0 for output in outputs) / num_tokens,
        "first_token_ms": 1e3 * median(first_s),
        "all_in_turn_s": sum(first_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    engines = {
        cached: LLM(args.model, dtype="bfloat16", enable_prefix_caching=cached, max_model_len=args.shared + 200)
        for cached in (False, True)
    }
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for repetition in range(args.repetitions):
        prompts = make_prompts(args.requests, args.shared, repetition)
        for cached, llm in engines.items():
            rows[cached].append(run(llm, prompts))
    print(f"{args.requests} requests, {args.shared} shared + {NUM_OWN} own tokens, {NUM_OUT} out; medians")
    print(f"{'':24}{'cache off':>12}{'cache on':>12}{'off / on':>12}")
    for name in rows[True][0]:
        off, on = (median(row[name] for row in rows[cached]) for cached in (False, True))
        ratio = f"{off / on:12.1f}" if name.endswith(("_s", "_ms")) else ""
        print(f"{name:24}{off:12.3f}{on:12.3f}{ratio}")


if __name__ == "__main__":
    main()
