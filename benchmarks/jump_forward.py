"""What forced tokens save and change: `python benchmarks/jump_forward.py [MODEL] [--temperature T] [--every N]`.

One request for each schema of the conformance corpus that is supported, with and without jump-forward. Prints how many
tokens were sampled (each is a step of its request), how many steps the engine took, how many outputs have the same
text, where the others part, and how many finished ones have their form. Counts, so any machine will do.
"""

import argparse
import asyncio
import json
import lzma
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from pagemill import SamplingParams
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import EngineOverloadedError, RequestError
from pagemill.launch import build_config
from pagemill.messages.outputs import CompletionOutput
from pagemill.messages.pending import Pending
from pagemill.messages.sampling_params import RequestOutputKind
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from pagemill.tokenizers.load import tokenizer_of
from pagemill.worker.worker import Worker

FINAL_ONLY = RequestOutputKind.FINAL_ONLY
CORPUS = Path(__file__).parents[1] / "tests/conformance/data/json-schemas.jsonl.xz"
PROMPT = "An example, as JSON:\n"
COMPACT = {"disable_any_whitespace": True}
NUM_AT_A_TIME = 48
"""Requests, of which no more may have their grammars checked."""
LAYOUTS: dict[str, dict[str, Any]] = {"compact": COMPACT, "any whitespace": {}}


class CountingExecutor(UniprocExecutor):
    """Counts steps, and the tokens that each request samples; requests are told apart by their seeds."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.num_steps = 0
        self.num_sampled: Counter[int] = Counter()
        """By seed."""
        self._seeds: dict[int, int] = {}

    def execute_model(self, step: SchedulerOutput) -> None:
        """Note whose slots they are."""
        self._seeds |= {new.slot: new.params.seed for new in step.new}
        super().execute_model(step)

    def sample_tokens(self, *payloads: Any) -> Pending[ModelRunnerOutput]:
        """Of the step that was executed last."""
        pending = super().sample_tokens(*payloads)
        self.num_steps += 1
        self.num_sampled.update(self._seeds[slot] for slot in pending.result().slots.tolist())
        return pending


@dataclass(frozen=True)
class Run:
    """All outputs with one setting."""

    outputs: dict[str, CompletionOutput]
    """By the schema's name; without those that are refused."""
    sampled: dict[str, int]
    """Tokens that were sampled, in a step each; the others were forced."""
    num_steps: int
    """Of the engine, which computes many requests at a time."""

    def num_tokens(self, names: Collection[str]) -> int:
        """Of some outputs."""
        return sum(len(self.outputs[name].token_ids) for name in names)

    def num_sampled(self, names: Collection[str]) -> int:
        """The same, of those that were not forced."""
        return sum(self.sampled[name] for name in names)

    def finished(self) -> dict[str, CompletionOutput]:
        """Those that are complete."""
        return {name: one for name, one in self.outputs.items() if one.finish_reason == "stop"}


def corpus(every: int = 1) -> dict[str, Any]:
    """Schemas by name."""
    with lzma.open(CORPUS, "rt") as lines:
        entries = [json.loads(line) for line in lines]
    return {entry["name"]: entry["schema"] for entry in entries[::every]}


def run(
    model: str, schemas: dict[str, Any], params: SamplingParams, form: dict[str, Any], *, jump: bool, **settings: Any
) -> Run:
    """One output for each schema, in the order of their names' first use. `form`: fields of `StructuredOutputsParams`;
    `settings`: of the engine."""
    return asyncio.run(_run(model, schemas, params, form, {"enable_jump_forward": jump, **settings}))


async def _run(
    model: str, schemas: dict[str, Any], params: SamplingParams, form: dict[str, Any], settings: dict[str, Any]
) -> Run:
    config = build_config(
        EngineArgs(
            model,
            **({"max_model_len": 1024, "kv_cache_memory_bytes": 4 << 30, "max_num_seqs": NUM_AT_A_TIME} | settings),
        )
    )
    executor = CountingExecutor(Worker(config))
    tokenizer = tokenizer_of(config.model, config.facts)
    client = InprocClient(EngineCore(config, executor))
    llm = AsyncLLM(client, tokenizer, config.facts, config.scheduler, cache=config.cache)

    turn = asyncio.Semaphore(NUM_AT_A_TIME)

    async def one(seed: int, schema: Any) -> CompletionOutput | None:
        held = StructuredOutputsParams(json=schema, **form)
        asked = params.replace(seed=seed, structured_outputs=held)
        async with turn:
            while True:
                try:
                    outputs = [item async for item in llm.generate(PROMPT, asked)]
                    return outputs[-1].outputs[0]
                except RequestError:
                    return None
                except EngineOverloadedError:  # a busy machine has no time to check a grammar
                    await asyncio.sleep(1)

    try:
        found = await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas.values())))
    finally:
        await llm.shutdown()
    outputs = {name: output for name, output in zip(schemas, found, strict=True) if output is not None}
    sampled = {name: executor.num_sampled[seed] for seed, name in enumerate(schemas)}
    return Run(outputs, sampled, executor.num_steps)


def invalid(schemas: dict[str, Any], finished: dict[str, CompletionOutput]) -> list[str]:
    """Finished outputs that do not have their form, with the reason."""
    found = []
    for name, one in finished.items():
        schema = schemas[name]
        try:
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(one.text))
        except (jsonschema.ValidationError, ValueError) as error:
            found.append(f"{name}: {str(error).splitlines()[0]}: {one.text[:200]}")
    return found


def same_text(one: CompletionOutput, other: CompletionOutput) -> bool:
    """Whether two outputs say the same, as far as both go: one that is cut off at a number of tokens goes as far as its
    tokens reach."""
    cut = "length" in (one.finish_reason, other.finish_reason)
    size = min(len(one.text), len(other.text)) if cut else None
    return one.text[:size] == other.text[:size]


def parting(one: CompletionOutput, other: CompletionOutput, texts: Any) -> str:
    """The first token in which two outputs differ, in both."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    at = next((place for place, (left, right) in pairs if left != right), None)
    if at is None:
        return "one is longer"
    left, right = (texts(output.token_ids[at]) for output in (one, other))
    why = "another split" if left.startswith(right) or right.startswith(left) else "another choice"
    return f"token {at}: {left!r}, without {right!r}: {why}"


def fewer(found: Run, without: Run, names: Collection[str]) -> str:
    """What is saved of the steps that some outputs take, each request for itself."""
    share = found.num_sampled(names) / found.num_tokens(names)
    return f"{1 - share * without.num_tokens(names) / without.num_sampled(names):.1%}"


def compare(model: str, schemas: dict[str, Any], params: SamplingParams, layout: str, **settings: Any) -> list[str]:
    """A row of the table, and a line for each output that differs."""
    form = LAYOUTS[layout]
    without = run(model, schemas, params, form, jump=False, **settings)
    found = run(model, schemas, params, form, jump=True, **settings)
    config = build_config(EngineArgs(model))
    texts = tokenizer_of(config.model, config.facts).token_bytes
    names = found.outputs
    others = [name for name, one in names.items() if not same_text(one, without.outputs[name])]
    finished = found.finished()
    heavy = [name for name in finished if name in without.finished()]
    wrong = [*invalid(schemas, finished), *invalid(schemas, without.finished())]
    row = [
        layout,
        f"{params.temperature:g}",
        len(names),
        f"{without.num_tokens(names)} / {found.num_tokens(names)}",
        f"{without.num_sampled(names)} / {found.num_sampled(names)}",
        fewer(found, without, names),
        f"{without.num_sampled(heavy)} / {found.num_sampled(heavy)}",
        fewer(found, without, heavy) if heavy else "",
        f"{without.num_steps} / {found.num_steps}",
        f"{len(names) - len(others)} ({1 - len(others) / len(names):.1%})",
        f"{len(without.finished())} / {len(finished)}",
        len(wrong),
    ]
    lines = ["| " + " | ".join(map(str, row)) + " |"]
    lines += [f"  {name}: {parting(found.outputs[name], without.outputs[name], texts)}" for name in others]
    return lines + [f"  INVALID {line}" for line in wrong]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and what it does not say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.5])
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output")
    parser.add_argument("--every", type=int, default=1, help="one schema in so many")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--logprobs", type=int, help="ask for log-probabilities with so many candidates")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args(arguments)
    schemas = corpus(given.every)
    print("| layout | temperature | requests | tokens without / with | sampled | fewer | of finished outputs | fewer "
          "| engine steps | same text | finished | invalid |")  # fmt: skip
    print("| " + "--- | " * 12)
    for layout in given.layout:
        for temperature in given.temperature:
            params = SamplingParams(
                temperature=temperature, max_tokens=given.tokens, logprobs=given.logprobs, output_kind=FINAL_ONLY
            )
            print("\n".join(compare(given.model, schemas, params, layout, dtype=given.dtype)), flush=True)


if __name__ == "__main__":
    main()
