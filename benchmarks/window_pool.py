"""Long prompts through a sliding-window model, in a KV cache that is only large enough because blocks out of the
window are freed.

    PYTHONPATH=. python benchmarks/window_pool.py MODEL.gguf [--requests 32] [--kv-mib 40]

First the engine is asked to start with the same memory and without the hybrid manager: it must refuse. Then the
requests run, and every answer of a sample is compared with that of an engine with ample memory (where the native
kernels run, a result does not depend on the batch, so that they must be equal).
"""

import argparse
import random
import time

from pagemill import LLM, SamplingParams
from pagemill.errors import ConfigError

SHORTEST, LONGEST = 2_000, 6_000
NUM_OUT = 16


def make_prompts(num_requests: int) -> list[list[int]]:
    """Random token ids, of evenly spread lengths."""
    rng = random.Random(0)
    step = (LONGEST - SHORTEST) / max(num_requests - 1, 1)
    lengths = [round(SHORTEST + index * step) for index in range(num_requests)]
    rng.shuffle(lengths)
    return [[rng.randrange(300, 200_000) for _ in range(length)] for length in lengths]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--kv-mib", type=int, default=40)
    parser.add_argument("--compare", type=int, default=4, help="answers compared with those of ample memory")
    args = parser.parse_args()
    settings = {"dtype": "bfloat16", "max_model_len": LONGEST + 100, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    memory = {"kv_cache_memory_bytes": args.kv_mib << 20}
    try:
        LLM(args.model, disable_hybrid_kv_cache_manager=True, **memory, **settings)
    except ConfigError as error:
        print(f"every token kept, {args.kv_mib} MiB: refused ({error})")
    else:
        raise SystemExit(f"{args.kv_mib} MiB hold a request even if every token is kept; give less with --kv-mib")
    prompts = make_prompts(args.requests)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    with LLM(args.model, **memory, **settings) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        duration_s = time.perf_counter() - start
    finished = sum(len(output.outputs[0].token_ids) == NUM_OUT for output in outputs)
    num_tokens = sum(map(len, prompts))
    print(
        f"windows freed, {args.kv_mib} MiB: {finished} of {args.requests} requests finished, "
        f"{num_tokens} prompt tokens in {duration_s:.0f} s"
    )
    with LLM(args.model, **settings) as ample:
        expected = ample.generate(prompts[: args.compare], greedy, use_tqdm=False)
    same = sum(
        left.outputs[0].token_ids == right.outputs[0].token_ids for left, right in zip(expected, outputs, strict=False)
    )
    print(f"equal to ample memory: {same} of {args.compare}")
    if finished != args.requests or same != args.compare:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
