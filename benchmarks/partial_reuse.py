"""What partial-block reuse saves beyond whole blocks: two workloads, with the switch and without it, interleaved.

    PYTHONPATH=. python benchmarks/partial_reuse.py [--block-size 16] [--requests 40] [--repetitions 3]

questions: short questions one after another, behind a shared prompt whose length is no multiple of the block size.
chat: conversations, turn by turn in rotation; every turn's prompt is all that was said before, and a short message.
Both report prompt tokens found in the cache and computed, and the time to the first token. Every repetition begins
with an empty cache; the first of the questions, and the first turn of each conversation, are not counted.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import mean, median

from pagemill import LLM, SamplingParams

NUM_QUESTION, NUM_MESSAGE, NUM_REPLY, NUM_TURNS = 8, 12, 24, 5


class Measured:
    """Prompts answered by one engine, and what was found of them."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.found: list[int] = []
        self.computed: list[int] = []
        self.first_token_ms: list[float] = []

    def first_token(self, prompt: list[int], *, counts: bool) -> None:
        """Sample one token."""
        start = time.perf_counter()
        [output] = self.llm.generate([prompt], greedy(1), use_tqdm=False)
        elapsed_ms = 1e3 * (time.perf_counter() - start)
        if counts:
            found = output.num_cached_tokens or 0
            self.found.append(found)
            self.computed.append(len(prompt) - found)
            self.first_token_ms.append(elapsed_ms)

    def reply(self, prompt: list[int]) -> list[int]:
        """The tokens of an answer."""
        [output] = self.llm.generate([prompt], greedy(NUM_REPLY), use_tqdm=False)
        return list(output.outputs[0].token_ids)


def greedy(max_tokens: int) -> SamplingParams:
    """So many of the likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def make_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids of a text that nobody wrote."""
    return [rng.randrange(100, 40_000) for _ in range(count)]


def questions(measured: Measured, args: argparse.Namespace, seed: int) -> None:
    """The same beginning, every time with another end."""
    rng = random.Random(seed)
    shared = make_tokens(rng, args.shared)
    for index in range(args.requests):
        measured.first_token(shared + make_tokens(rng, NUM_QUESTION), counts=index > 0)


def chat(measured: Measured, args: argparse.Namespace, seed: int) -> None:
    """As many conversations as give the number of requests."""
    rng = random.Random(seed)
    said: list[list[int]] = [[] for _ in range(max(1, args.requests // NUM_TURNS))]
    for turn in range(NUM_TURNS):
        for conversation in said:
            conversation += make_tokens(rng, NUM_MESSAGE)
            measured.first_token(conversation, counts=turn > 0)
            conversation += measured.reply(conversation)


WORKLOADS: dict[str, Callable[[Measured, argparse.Namespace, int], None]] = {"questions": questions, "chat": chat}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--shared", type=int, default=203, help="tokens that all questions share")
    parser.add_argument("--requests", type=int, default=40, help="questions, and turns of all conversations")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    engines = {
        reuse: LLM(args.model, max_model_len=1024, block_size=args.block_size, enable_partial_block_reuse=reuse)
        for reuse in (False, True)
    }
    print(f"blocks of {args.block_size}; per request")
    print(f"{'':42}{'whole blocks':>14}{'to the token':>14}{'ratio':>8}")
    for name, workload in WORKLOADS.items():
        measured = {reuse: Measured(llm) for reuse, llm in engines.items()}
        for repetition in range(args.repetitions):
            for reuse, llm in engines.items():
                llm.reset_prefix_cache()
                workload(measured[reuse], args, repetition)
        whole, partial = measured[False], measured[True]
        rows = {
            "prompt tokens found (mean)": (mean(whole.found), mean(partial.found)),
            "prompt tokens computed (mean)": (mean(whole.computed), mean(partial.computed)),
            "first token, ms (median)": (median(whole.first_token_ms), median(partial.first_token_ms)),
        }
        for label, (without, reused) in rows.items():
            print(f"{f'{name}: {label}':<42}{without:>14.2f}{reused:>14.2f}{without / reused:>8.2f}")


if __name__ == "__main__":
    main()
