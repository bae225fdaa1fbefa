"""`start_table`: what was decided at start-up, as a short table for people. Does not know how it was decided."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.catalog.executors import UNI
from pagemill.config.choices import Runner
from pagemill.config.decisions import Decision
from pagemill.config.graph_config import CompilationConfig
from pagemill.config.graph_mode import GraphMode
from pagemill.config.no_effect import IdleSetting
from pagemill.config.pooler_config import PoolerConfig

WIDTH = 118


def _plain(value: Any) -> str:
    return str(value)


def _pooler(value: PoolerConfig) -> str:
    if value.task.embeds:
        return f"{value.pooling_type}, {'scaled to length 1' if value.normalize else 'as it is'}"
    classes = f"{value.num_outputs} class{'es' * (value.num_outputs > 1)}"
    return f"{value.pooling_type}, {classes}, {value.activation if value.use_activation else 'as they are'}"


def _graphs(value: CompilationConfig) -> str:
    return f"mode {value.mode}, graphs {value.cudagraph_mode}, up to {value.max_cudagraph_capture_size} tokens"


_SHOWN: dict[str, Callable[[Any], str]] = {
    "device": _plain,
    "runner": _plain,
    "pooler_config": _pooler,
    "dtype": _plain,
    "max_model_len": _plain,
    "max_num_batched_tokens": _plain,
    "distributed_executor_backend": _plain,
    "compilation_config": _graphs,
    "speculative_config": _plain,
}
"""Settings whose defaults change what users see, or what the model needs, in the order of the table; how each is
shown."""
_USUAL = {("runner", Runner.GENERATE), ("distributed_executor_backend", UNI)}


def start_table(decisions: Sequence[Decision], idle: Sequence[IdleSetting]) -> str:
    """One row for each default that matters and for each setting that was given and does not; empty when there are
    none."""
    from rich.console import Console  # deferred, with the next: only a start needs it
    from rich.table import Table

    rows = [
        (field, show(decision.value), decision.why)
        for field, show in _SHOWN.items()
        for decision in decisions
        if decision.field == field and not _is_usual(decision)
    ]
    rows += [(setting.name, "no effect", setting.why) for setting in idle]
    if not rows:
        return ""
    table = Table("setting", "value", "because", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as written:
        console.print(table)
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def _is_usual(decision: Decision) -> bool:
    if isinstance(decision.value, CompilationConfig):
        return decision.value.cudagraph_mode is GraphMode.NONE and not decision.value.mode
    return (decision.field, decision.value) in _USUAL
