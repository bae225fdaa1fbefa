"""Fills in `CompilationConfig`: by the optimization level, and by what the device can. Pure.

What the model's attention backends can is not known yet; the worker lowers the mode to that (worker/graphs/downgrade).
"""

from dataclasses import dataclass, replace

from pagemill.config.capture_sizes import capture_sizes, default_largest
from pagemill.config.decisions import completed
from pagemill.config.graph_config import ATTENTION_OP, CompilationConfig, CompilationSettings, GraphSettings
from pagemill.config.graph_mode import GraphMode
from pagemill.errors import ConfigError

NO_COMPILER = 0
PIECEWISE_COMPILER = 3
MODES = {NO_COMPILER: "no compilation", PIECEWISE_COMPILER: "piecewise torch.compile"}

LEVELS: dict[int, tuple[int, GraphMode]] = {
    0: (NO_COMPILER, GraphMode.NONE),
    1: (NO_COMPILER, GraphMode.PIECEWISE),
    2: (NO_COMPILER, GraphMode.FULL_AND_PIECEWISE),
    3: (PIECEWISE_COMPILER, GraphMode.FULL_AND_PIECEWISE),
}
"""Optimization level -> (mode of compilation, mode of graphs)."""


@dataclass(frozen=True)
class GraphLimits:
    """What the sizes of batches are bounded by, and what the device is."""

    max_num_seqs: int
    token_budget: int
    device: str
    captures: bool
    """Whether the device has something like CUDA graphs."""
    query_len: int = 1
    """Tokens per request of a decode step."""


def complete(graphs: GraphSettings, limits: GraphLimits) -> CompilationConfig:
    """What runs. Explicit settings stay as they are, whatever the level.

    Raises ConfigError for settings that contradict each other or the device.
    """
    if graphs.optimization_level not in LEVELS:
        raise ConfigError(f"optimization_level={graphs.optimization_level} is not one of {', '.join(map(str, LEVELS))}")
    given = _with_shortcuts(graphs)
    _check(graphs, given, limits)
    off = graphs.enforce_eager or not limits.captures
    level_mode, _ = LEVELS[0 if off else graphs.optimization_level]
    mode = level_mode if given.mode is None else given.mode
    splitting_ops = _splitting_ops(given, mode)
    graph_mode = given.cudagraph_mode or _default_mode(graphs, splitting_ops, off)
    sizes, largest = _sizes(given, graph_mode, limits)
    return completed(
        CompilationConfig,
        given,
        mode=mode,
        cudagraph_mode=graph_mode,
        splitting_ops=splitting_ops,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=largest,
    )


def _with_shortcuts(graphs: GraphSettings) -> CompilationSettings:
    """What GraphConfig repeats of CompilationConfig is the same setting."""
    given = graphs.compilation_config
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        short, long = getattr(graphs, name), getattr(given, name)
        if short is not None and long is not None and short != long:
            raise ConfigError(f"{name}={short} and compilation_config.{name}={long} contradict each other; give one")
        if short is not None:
            given = replace(given, **{name: short})
    return given


def _check(graphs: GraphSettings, given: CompilationSettings, limits: GraphLimits) -> None:
    wants_graphs = given.cudagraph_mode not in (None, GraphMode.NONE)
    if given.mode is not None and given.mode not in MODES:
        allowed = ", ".join(f"{mode} ({what})" for mode, what in MODES.items())
        raise ConfigError(f"compilation_config: mode={given.mode} is not one of {allowed}")
    for wanted, what in (
        (wants_graphs, f"cudagraph_mode={str(given.cudagraph_mode)!r}"),
        (given.mode, f"mode={given.mode}"),
    ):
        if graphs.enforce_eager and wanted:
            raise ConfigError(f"enforce_eager=True and compilation_config.{what} contradict each other; give one")
    if wants_graphs and not limits.captures:
        raise ConfigError(
            f"compilation_config: cudagraph_mode={str(given.cudagraph_mode)!r} needs a GPU, and the device is "
            f"{limits.device}; leave it out, or use NONE"
        )


def _splitting_ops(given: CompilationSettings, mode: int) -> tuple[str, ...]:
    ops = given.splitting_ops
    if given.pass_config.fuse_attn:
        if mode != PIECEWISE_COMPILER:
            raise ConfigError(f"pass_config: fuse_attn=True needs mode={PIECEWISE_COMPILER}, and mode is {mode}")
        if ops:
            raise ConfigError(
                f"pass_config: fuse_attn=True and splitting_ops={list(ops)} contradict each other; "
                "the compiler sees across attention only where nothing is split"
            )
        return ()
    if ops is None:
        return (ATTENTION_OP,)
    if mode == NO_COMPILER and ops not in ((), (ATTENTION_OP,)):
        raise ConfigError(
            f"compilation_config: splitting_ops={list(ops)} needs mode={PIECEWISE_COMPILER}; without a compiler a "
            f"model is cut at {ATTENTION_OP} or, with an empty list, nowhere"
        )
    return ops


def _default_mode(graphs: GraphSettings, splitting_ops: tuple[str, ...], off: bool) -> GraphMode:
    mode = GraphMode.NONE if off else LEVELS[graphs.optimization_level][1]
    if mode is GraphMode.NONE:
        return mode
    # Without pieces the rest of the step must be captured with attention, or not at all.
    return mode if splitting_ops else GraphMode.FULL


def _sizes(given: CompilationSettings, mode: GraphMode, limits: GraphLimits) -> tuple[tuple[int, ...], int]:
    """The sizes for which there are graphs, and the largest."""
    sizes = given.cudagraph_capture_sizes
    largest = given.max_cudagraph_capture_size
    if sizes is None:
        wanted = default_largest(limits.max_num_seqs, limits.token_budget, limits.query_len)
        largest = min(largest or wanted, limits.token_budget)
        return () if mode is GraphMode.NONE else capture_sizes(largest), largest
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"cudagraph_capture_sizes={list(sizes)} is not allowed: one or more numbers of tokens, each at least 1; "
            "for no graphs use cudagraph_mode NONE"
        )
    bound = limits.token_budget
    name = "max_num_batched_tokens"
    if largest is not None and largest < bound:
        bound = largest
        name = "max_cudagraph_capture_size"
    if max(sizes) > bound:
        raise ConfigError(f"cudagraph_capture_sizes: {max(sizes)} is more than {name}={bound}")
    sizes = tuple(sorted(set(sizes)))
    return sizes, sizes[-1]
