"""One engine of benchmarks/structured.py: python structured_engine.py pagemill|vllm MODEL REQUESTS THREADS DTYPE.

Reads a job from stdin, as a line of JSON, and answers with one on stdout; see the methods of `Engine`. Knows no other
engine; each is imported where it is asked for.
"""

import json
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Write one example as JSON:"
Schema = dict[str, Any]


class Steps:
    """What the engine's steps took, and when each request got its tokens."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self.wall_ms: list[float] = []
        """Of steps in which all requests got a token, and none its first."""
        self.cpu_ms: list[float] = []
        """The same, of all threads together."""
        self.count = 0
        self._lengths: dict[str, int] = {}
        self._firsts: dict[str, tuple[float, int]] = {}
        """When a request got its first tokens, and how many these were."""
        self._lasts: dict[str, float] = {}

    def measure(self, step: Callable[[], Any], look: Callable[[Any], dict[str, int]]) -> Any:
        """What `step` returns; `look` says of that which requests got how many tokens."""
        began, cpu = time.perf_counter(), time.process_time()
        found = step()
        now, cpu = time.perf_counter(), time.process_time() - cpu
        counts = look(found)
        begins = not counts.keys() <= self._firsts.keys()
        for name, count in counts.items():
            self._lengths[name] = self._lengths.get(name, 0) + count
            self._firsts.setdefault(name, (now, count))
            self._lasts[name] = now
        self.count += bool(counts)
        if len(counts) == self._num_requests and not begins:
            self.wall_ms.append(1000 * (now - began))
            self.cpu_ms.append(1000 * cpu)
        return found

    def token_ms(self) -> float:
        """The mean time between two tokens of a request: from its first tokens to its last, over all requests. Several
        tokens at once come with no time between them."""
        taken = sum(self._lasts[name] - first for name, (first, _) in self._firsts.items())
        return 1000 * taken / sum(self._lengths[name] - count for name, (_, count) in self._firsts.items())


class Engine(ABC):
    """Does the works that are compared."""

    def __init__(self, model: str, num_requests: int) -> None:
        self.num_requests = num_requests

    def supported(self, schemas: list[Schema]) -> list[bool]:
        """Which schemas an output can be held to."""
        return [self.supports(schema) for schema in schemas]

    @abstractmethod
    def supports(self, schema: Schema) -> bool:
        """Whether an output can be held to a schema. What is made for that is kept."""

    @abstractmethod
    def generate(self, schemas: list[Schema] | list[None], num_tokens: int, steps: Steps) -> list[tuple[int, bool]]:
        """A request for each schema, or a free one, at temperature 1: its tokens, and whether it is complete."""

    def run(
        self, schemas: list[Schema] | None, num_tokens: int, forces: bool = True, apart: bool = False
    ) -> dict[str, float]:
        """As many requests as there may be. `forces`: whether tokens without a choice are not sampled; `apart`: whether
        masks change logits in a pass of their own."""
        self.set_forced(forces)
        self.set_apart(apart)
        steps = Steps(self.num_requests)
        began = time.perf_counter()
        served = self.generate(schemas or [None] * self.num_requests, num_tokens, steps)
        seconds = time.perf_counter() - began
        total = sum(count for count, _ in served)
        return {
            "step_ms": _median(steps.wall_ms),
            "token_ms": steps.token_ms(),
            "cpu_ms": _median(steps.cpu_ms),
            "steps_of_all": len(steps.wall_ms),
            "steps": steps.count,
            "tokens": total,
            "tokens_per_s": total / seconds,
            "seconds": seconds,
            "complete": sum(complete for _, complete in served),
        }

    def first_token(self, schema: Schema, times: int) -> dict[str, float]:
        """Milliseconds to the only token of a request by itself, free and with a form that is known, by turns."""
        taken: dict[str, list[float]] = {name: [] for name in ("free_ms", "held_ms", "free_cpu_ms", "held_cpu_ms")}
        for turn in range(2 * times + 4):
            kind = "held" if turn % 2 else "free"
            wall, cpu = time.perf_counter(), time.process_time()
            self.generate([schema] if kind == "held" else [None], 1, Steps(0))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= 4:
                taken[f"{kind}_ms"].append(1000 * wall)
                taken[f"{kind}_cpu_ms"].append(1000 * cpu)
        return {name: statistics.median(values) for name, values in taken.items()}

    def set_forced(self, forces: bool) -> None:  # noqa: B027 - most engines force none
        """Whether tokens without a choice are appended without being sampled."""

    def set_apart(self, apart: bool) -> None:  # noqa: B027 - most engines know one way
        """Whether masks change logits in a pass of their own."""


def _median(values: list[float]) -> float:
    """NaN where no step had tokens of all requests."""
    return statistics.median(values) if values else math.nan


class Pagemill(Engine):
    """This project, in this process."""

    def __init__(self, model: str, num_requests: int, num_threads: int, dtype: str) -> None:
        from pagemill import LLM
        from pagemill.engine.core import EngineCore

        super().__init__(model, num_requests)
        is_bare = Path(model).is_dir() and not any(Path(model).glob("*.safetensors"))
        self._llm = LLM(
            model,
            max_model_len=2048,
            max_num_seqs=num_requests,
            cpu_threads=num_threads or None,
            load_format="dummy" if is_bare else "auto",
            dtype=dtype,
        )
        self._steps = Steps(0)
        step = EngineCore.step

        def look(found: list[Any]) -> dict[str, int]:
            counts: dict[str, int] = {}
            for outputs in found:
                counts |= dict.fromkeys(outputs.request_ids, 1)
                several = {output.request_id: len(output.new_token_ids) for output in outputs.outputs}
                counts |= {name: count for name, count in several.items() if count}
            return counts

        EngineCore.step = lambda core: self._steps.measure(lambda: step(core), look)  # type: ignore[method-assign]

    def supports(self, schema: Schema) -> bool:
        from pagemill.errors import RequestError

        try:
            self.generate([schema], 1, Steps(0))
        except RequestError:
            return False
        return True

    def generate(self, schemas: list[Schema] | list[None], num_tokens: int, steps: Steps) -> list[tuple[int, bool]]:
        from pagemill import SamplingParams
        from pagemill.messages.structured_outputs import StructuredOutputsParams

        self._steps = steps
        free = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
        params = [
            free
            if schema is None
            else free.replace(ignore_eos=False, structured_outputs=StructuredOutputsParams(json=schema))
            for schema in schemas
        ]
        outputs = self._llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        return [(len(one.token_ids), one.finish_reason == "stop") for one in found]

    def set_forced(self, forces: bool) -> None:
        from pagemill.engine.structured_output.following import FollowedGrammar

        if not hasattr(self, "_forced_tokens"):
            self._forced_tokens = FollowedGrammar.forced_tokens
        chosen = self._forced_tokens if forces else lambda grammar: ()
        FollowedGrammar.forced_tokens = chosen  # type: ignore[method-assign]

    def set_apart(self, apart: bool) -> None:
        from pagemill.worker.sampling.sampler import Sampler

        if not hasattr(self, "_masks"):
            self._masks = Sampler.masks
        Sampler.masks = (lambda sampler, slots: None) if apart else self._masks  # type: ignore[method-assign]


class Vllm(Engine):
    """vLLM with xgrammar, its core in this process. It has its own number of threads."""

    def __init__(self, model: str, num_requests: int, num_threads: int, dtype: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        super().__init__(model, num_requests)
        config = {"backend": "xgrammar"}
        self._llm = LLM(
            model, max_model_len=2048, dtype=dtype, max_num_seqs=num_requests, structured_outputs_config=config
        )
        self._number = 0

    def supports(self, schema: Schema) -> bool:
        from vllm.exceptions import VLLMValidationError

        try:
            # Where xgrammar fails later, the request ends without a token.
            return [count for count, _ in self.generate([schema], 1, Steps(0))] == [1]
        except (ValueError, VLLMValidationError):
            return False

    def generate(self, schemas: list[Schema] | list[None], num_tokens: int, steps: Steps) -> list[tuple[int, bool]]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        engine = self._llm.llm_engine
        for schema in schemas:
            form = {} if schema is None else {"structured_outputs": StructuredOutputsParams(json=schema)}
            self._number += 1
            params = SamplingParams(
                temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=schema is None, detokenize=False, **form
            )
            engine.add_request(str(self._number), PROMPT, params)
        lengths: dict[str, int] = {}
        complete: dict[str, bool] = {}

        def look(outputs: list[Any]) -> dict[str, int]:
            counts: dict[str, int] = {}
            for output in outputs:
                length = len(output.outputs[0].token_ids)
                counts[output.request_id] = length - lengths.get(output.request_id, 0)
                lengths[output.request_id] = length
                complete[output.request_id] = output.outputs[0].finish_reason == "stop"
            return counts

        while engine.has_unfinished_requests():
            steps.measure(engine.step, look)
        return [(length, complete[name]) for name, length in lengths.items()]


ENGINES: dict[str, Callable[[str, int, int, str], Engine]] = {"pagemill": Pagemill, "vllm": Vllm}


def main() -> None:
    """Says "ready", then answers jobs until stdin ends. Whatever the engine prints goes to stderr."""
    name, model, num_requests, num_threads, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = ENGINES[name](model, int(num_requests), int(num_threads), dtype)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(engine, job.pop("work"))(**job)), file=answers)


if __name__ == "__main__":
    main()
