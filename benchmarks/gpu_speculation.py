"""What verifying drafts costs on a GPU, and what it gains: plain decoding against scripted drafts, of known acceptance.

    PYTHONPATH=. python benchmarks/gpu_speculation.py [--batches 1 32] [--drafts 5] [--tokens 256] [--head]
        [--json FILE]

Weights are random, but for the last norm's, which are zeros: every text is the same token again and again, whatever
rounding does, so that a scripted proposer knows which draft is right and is so exactly as often as it should be. The
figures are those of the machinery: nobody computes the drafts. Two engines run one after the other in this process.

With --head, an EAGLE-3 head of random weights (draft_vocab_size 32,000) computes as many drafts as are verified; they
are thrown away for the scripted ones, so that acceptance is the same. `the drafts`: from a step's tokens on the host to
these, where a step waits for them; behind most steps the head guesses while the host packs the next one.

`host`: from a step's tokens on the host to the next step's launch; for so long the GPU waits for the host. Where steps
run ahead, plain ones have none of it.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill import LLM, SamplingParams
from pagemill.catalog.proposers import PROPOSERS
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.worker.forward.device import DeviceForward
from pagemill.worker.forward.downloads import DownloadedTokens
from pagemill.worker.forward.guess_graphs import GuessGraphs
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.spec_decode.drafts import SlotDrafts
from pagemill.worker.spec_decode.heads import HeadProposer
from pagemill.worker.spec_decode.interface import Proposer, ProposerContext
from pagemill.worker.worker import Worker

MODEL = Path(__file__).parent / "configs" / "qwen3-8b"
HEAD = Path(__file__).parent / "configs" / "qwen3-8b-eagle3"
PATTERN = (0, 5, 1, 2, 3, 1)
"""Drafts that are right, step by step, of five: two in the mean, so that a step yields three tokens."""
PROMPT_TOKENS = 128
WARM_UP_TOKENS = 96
KV_BYTES = 8 << 30


class Scripted(Proposer):
    """Proposes the last token again as often as the pattern says, and then another."""

    def __init__(self, context: ProposerContext) -> None:
        self._states = context.states
        self._count = context.max_drafts
        self._turns = np.zeros(len(context.states.num_tokens), np.int64)

    def begin(self, new: NewRequest) -> None:
        self._turns[new.slot] = new.slot

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        states = self._states
        right = np.array(PATTERN)[self._turns[slots] % len(PATTERN)]
        self._turns[slots] += 1
        last = states.token_ids[slots, states.num_tokens[slots] - 1]
        drafts: Int32Array = last[:, None] + (np.arange(self._count) >= right[:, None])
        return list(drafts.astype(np.int32))


class ScriptedHead(HeadProposer):
    """Computes drafts, and proposes scripted ones."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        self.script = Scripted(context)

    def begin(self, new: NewRequest) -> None:
        super().begin(new)
        self.script.begin(new)

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        computed = super().propose(slots)
        scripted = self.script.propose(slots)
        return [drafts if len(own) else own for own, drafts in zip(computed, scripted, strict=True)]


def script_guesses_behind_steps() -> None:
    """Scripted drafts also in place of those that the device computes behind a step, where the next one finds them."""
    take = SlotDrafts.take_guesses
    pinned: dict[int, Tensor] = {}

    def scripted(drafts: SlotDrafts, slots: Int32Array, guessed: Any) -> Any:
        proposer, steps = drafts._proposer, drafts._steps
        if isinstance(proposer, ScriptedHead) and isinstance(steps, GuessGraphs):
            found = np.stack(proposer.script.propose(slots))
            if len(found) not in pinned:  # pageable memory would make the host wait for the guesses
                pinned[len(found)] = torch.empty(found.shape, dtype=torch.int32, pin_memory=True)
            source = pinned[len(found)]  # sent long ago, now that a step's tokens are there
            source.numpy()[:] = found
            steps.drafts[: len(found)].copy_(source, non_blocking=True)
        return take(drafts, slots, guessed)

    SlotDrafts.take_guesses = scripted  # type: ignore[method-assign]


class Clock:
    """Counts steps, and the time between tokens and launches."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.host_s = 0.0
        self.head_s = 0.0
        self._there: float | None = None
        self._measure_head()
        self._watch(ModelRunner, "execute_model", after=self._count)
        self._watch(DownloadedTokens, "result", after=self._tokens_are_there)
        self._watch(DeviceForward, "run", after=self._launched)

    def restart(self) -> None:
        """Forget everything."""
        self.num_steps = 0
        self.host_s = 0.0
        self.head_s = 0.0
        self._there = None

    def _count(self) -> None:
        self.num_steps += 1

    def _tokens_are_there(self) -> None:
        self._there = time.perf_counter()

    def _launched(self) -> None:
        if self._there is not None:
            self.host_s += time.perf_counter() - self._there
            self._there = None

    def _measure_head(self) -> None:
        propose = SlotDrafts.propose

        def measured(drafts: SlotDrafts, *args: Any) -> Any:
            began = time.perf_counter()
            found = propose(drafts, *args)
            self.head_s += time.perf_counter() - began
            return found

        SlotDrafts.propose = measured  # type: ignore[method-assign]

    @staticmethod
    def _watch(owner: type, name: str, after: Any) -> None:
        method = getattr(owner, name)

        def watched(self: Any, *args: Any) -> Any:
            found = method(self, *args)
            after()
            return found

        setattr(owner, name, watched)


def zero_last_norms() -> None:
    """Engines that are made from now on say one token only."""
    load = Worker.load_model

    def load_and_zero(self: Worker) -> None:
        load(self)
        with torch.inference_mode():
            self.model.norm.weight.zero_()

    Worker.load_model = load_and_zero  # type: ignore[method-assign]


def measure(llm: LLM, clock: Clock, batch: int, num_tokens: int) -> dict[str, float]:
    """What the tokens behind the first WARM_UP_TOKENS take: the faster of three runs of either length, since graphs are
    captured while an engine has nothing else to do, beside the first ones."""
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(1000, 100_000, PROMPT_TOKENS).tolist() for _ in range(batch)]
    short = min(_once(llm, clock, prompts, WARM_UP_TOKENS) for _ in range(3))
    long = min(_once(llm, clock, prompts, num_tokens) for _ in range(3))
    seconds, steps, host_s, head_s = (after - before for before, after in zip(short, long, strict=True))
    tokens = batch * (num_tokens - WARM_UP_TOKENS)
    return {
        "step_ms": 1e3 * seconds / steps,
        "host_ms": 1e3 * host_s / steps,
        "head_ms": 1e3 * head_s / steps,
        "tokens_per_step": tokens / batch / steps,
        "tokens_per_s": tokens / seconds,
    }


def _once(llm: LLM, clock: Clock, prompts: list[list[int]], num_tokens: int) -> tuple[float, int, float, float]:
    """Seconds, steps, and seconds of the host and of the drafts."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    clock.restart()
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    taken = time.perf_counter() - began, clock.num_steps, clock.host_s, clock.head_s
    kinds = {token for output in outputs for token in output.outputs[0].token_ids}
    if len(kinds) != 1:
        raise RuntimeError(f"{len(kinds)} different tokens were said: {sorted(kinds)[:8]}")
    return taken


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures by engine and batch."""
    PROPOSERS.add("scripted", f"{__name__}:Scripted")
    zero_last_norms()
    clock = Clock()
    settings: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 4096,
        "max_num_seqs": max(args.batches), "kv_cache_memory_bytes": KV_BYTES, "enable_prefix_caching": True,
    }  # fmt: skip
    drafts = {"method": "scripted", "num_speculative_tokens": args.drafts, "adaptive": False}
    if args.head:
        script_guesses_behind_steps()
        PROPOSERS.replace("eagle3", f"{__name__}:ScriptedHead")
        drafts |= {"method": "eagle3", "model": str(HEAD)}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, given in (("plain", {}), ("drafts", {"speculative_config": drafts})):
        began = time.perf_counter()
        llm = LLM(args.model, **settings, **given)
        print(f"{name}: started in {time.perf_counter() - began:.1f} s", flush=True)
        for batch in args.batches:
            figures = found[f"{name} {batch}"] = measure(llm, clock, batch, args.tokens)
            plain = found[f"plain {batch}"]["tokens_per_s"]
            figures["ratio"] = figures["tokens_per_s"] / plain
            print(
                f"{name:6} batch {batch:3}: {figures['step_ms']:.3f} ms per step, {figures['host_ms']:.3f} of it the "
                f"host, {figures['head_ms']:.3f} the drafts, {figures['tokens_per_step']:.2f} tokens per step and "
                f"request, {figures['tokens_per_s']:.0f} tokens/s, {figures['ratio']:.2f}x",
                flush=True,
            )
        if args.profile and name == "drafts":
            profile(llm, args)
        llm.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return found


def profile(llm: LLM, args: argparse.Namespace) -> None:
    """Where the host's time goes, at the smallest batch."""
    import cProfile
    import pstats

    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    recorder = cProfile.Profile()
    recorder.enable()
    llm.generate([{"prompt_token_ids": [5] * PROMPT_TOKENS}] * min(args.batches), params, use_tqdm=False)
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--head", action="store_true", help="an EAGLE-3 head computes drafts")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = run(args)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
