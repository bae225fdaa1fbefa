"""When the host does what for the first token of a prompt: medians over prompts of their own, one at a time.

    python benchmarks/gpu_first_token.py [--model benchmarks/configs/qwen3-8b] [--lengths 128,2048] [--times 9]

Each line is a function, and when its first call began and ended, in ms from the call of `LLM.generate`. Dummy weights.
"""

import argparse
import functools
import gc
import importlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

WATCHED = (
    "pagemill.llm:LLM.generate",
    "pagemill.llm:LLM._prepare",
    "pagemill.llm:LLM._finish",
    "pagemill.engine.core:EngineCore.add",
    "pagemill.engine.core:EngineCore.step",
    "pagemill.engine.scheduler.scheduler:Scheduler.schedule",
    "pagemill.worker.worker:Worker.execute_model",
    "pagemill.worker.model_runner:ModelRunner._apply",
    "pagemill.worker.model_runner:build_batch",
    "pagemill.worker.forward.device:DeviceForward.run",
    "pagemill.worker.forward.mixed_batch:MixedShape.pack",
    "pagemill.worker.forward.device:DeviceForward._send",
    "pagemill.worker.forward.device:DeviceForward.upload",
    "pagemill.worker.forward.device:DeviceForward._mixed_step",
    "pagemill.worker.forward.device_batch:DeviceBatch.place_tokens",
    "pagemill.worker.kv_tensors.attention_groups:AttentionGroups.plan_with",
    "pagemill.model.network.program:Program._run",
    "pagemill.worker.forward.device:sample_rows",
    "pagemill.worker.worker:Worker.sample_tokens",
    "pagemill.worker.forward.downloads:DownloadedTokens.result",
    "pagemill.engine.scheduler.scheduler:Scheduler.update",
)


class Watch:
    """First calls of what is watched, within one prompt."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.collected_s = 0.0
        self._collecting = 0.0

    def forget(self) -> None:
        self.began.clear()
        self.ended.clear()
        self.collected_s = 0.0

    def on(self, path: str) -> None:
        """Put a watched function in the place of one."""
        module_name, _, name = path.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, attribute = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, attribute, self._watched(name, getattr(owner, attribute)))

    def collection(self, phase: str, _: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        now = time.perf_counter()
        if phase == "start":
            self._collecting = now
        else:
            self.collected_s += now - self._collecting

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if name in self.began:
                return function(*args, **named)
            self.began[name] = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.ended[name] = time.perf_counter()

        return call


def measure(llm: Any, watch: Watch, params: Any, length: int, times: int) -> None:
    """Print the lines of one length."""
    rng = random.Random(length)
    began, ended, collected = defaultdict(list), defaultdict(list), []
    for turn in range(times + 3):
        prompt = {"prompt_token_ids": [rng.randrange(40_000) for _ in range(length)]}
        watch.forget()
        start = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        if turn < 3:
            continue
        collected.append(watch.collected_s * 1e3)
        for name, at in watch.began.items():
            began[name].append((at - start) * 1e3)
            ended[name].append((watch.ended[name] - start) * 1e3)
    print(f"\n{length} tokens: collections {statistics.median(collected):.2f} ms, at most {max(collected):.2f}")
    print(f"{'began':>8}{'ended':>9}{'took':>9}{'at least':>10}{'at most':>9}")
    for name in sorted(began, key=lambda each: statistics.median(began[each])):
        first, last = statistics.median(began[name]), statistics.median(ended[name])
        took = [end - begin for begin, end in zip(began[name], ended[name], strict=True)]
        print(f"{first:8.2f}{last:9.2f}{last - first:9.2f}{min(took):10.2f}{max(took):9.2f}  {name}")


def main() -> None:
    """Start an engine, and print the lines of each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/configs/qwen3-8b")
    parser.add_argument("--lengths", default="128,2048,8192")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    lengths = [int(length) for length in asked.lengths.split(",")]
    from pagemill import LLM, SamplingParams  # after the arguments: torch

    watch = Watch()
    for path in WATCHED:
        watch.on(path)
    llm = LLM(
        asked.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(lengths) + 8,
        seed=0,
        device=asked.device,
    )
    gc.callbacks.append(watch.collection)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for length in lengths:
        measure(llm, watch, params, length, asked.times)


if __name__ == "__main__":
    main()
