"""Plug-ins: installed packages that add lines to the tables of the catalogue, found by their entry points.

Knows nothing about what they add. Every process loads them before it first looks into a table (catalog/registry.py).
A plug-in that fails is named in the log, in one line, and skipped.
"""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pagemill import envs
from pagemill.catalog.registry import Registry
from pagemill.log import get_logger

logger = get_logger(__name__)

GROUP = "pagemill.plugins"
"""Entry points `name = "package.module:register"`; `register(catalogue)` adds lines to its tables."""
VLLM_GENERAL_GROUP = "vllm.general_plugins"
"""Entry points of functions without arguments. They import vLLM, so they are called only when named."""
VLLM_OTHER_GROUPS = ("vllm.platform_plugins", "vllm.stat_logger_plugins", "vllm.io_processor_plugins")
"""They return classes of vLLM's own interfaces, which nothing here can call."""

_TABLES = "pagemill.catalog"


def _table(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{_TABLES}.{module}"), name)


@dataclass(frozen=True)
class Catalogue:
    """All extension points on one page. A plug-in adds to a table with `table.add(name, "module:attribute")`, and puts
    its own in place of a line that is there with `table.replace(name, "module:attribute")`. What a line names is
    imported when it is first used."""

    models: Registry[Any] = field(default_factory=lambda: _table("models", "MODELS"))
    """Architecture in config.json -> model class (docs/how-to/add-a-model.md)."""
    attention: Registry[Any] = field(default_factory=lambda: _table("attention", "ATTENTION"))
    """Name for --attention-backend -> `AttentionBackend` (docs/attention.md)."""
    platforms: Registry[Any] = field(default_factory=lambda: _table("platforms", "PLATFORMS"))
    """Name for --device -> `Platform`; --device auto tries them in order."""
    weights: Registry[Any] = field(default_factory=lambda: _table("weights", "WEIGHTS"))
    """Weight format -> function that iterates over named tensors."""
    quantization: Registry[Any] = field(default_factory=lambda: _table("quantization", "QUANTIZATION"))
    """Name for --quantization -> function (`QuantRequest`) -> `Quantization` of a checkpoint of floats."""
    quantized_checkpoints: Registry[Any] = field(
        default_factory=lambda: _table("quantization", "QUANTIZED_CHECKPOINTS")
    )
    """quant_method in a config.json -> the same, of that checkpoint (docs/how-to/add-a-quantization-method.md)."""
    logits: Registry[Any] = field(default_factory=lambda: _table("logits", "LOGITS"))
    """Logits processor -> `LogitsProcessor` class; later lines apply later."""
    step_extensions: Registry[Any] = field(default_factory=lambda: _table("step_extensions", "STEP_EXTENSIONS"))
    """Step extension -> `StepExtension`, its halves in the engine and on the workers; later lines apply later."""
    grammars: Registry[Any] = field(default_factory=lambda: _table("grammars", "GRAMMARS"))
    """Grammar backend -> `GrammarBackend` class."""
    proposers: Registry[Any] = field(default_factory=lambda: _table("proposers", "PROPOSERS"))
    """Proposer of drafts -> `Proposer` class."""
    endpoints: Registry[Any] = field(default_factory=lambda: _table("endpoints", "ENDPOINTS"))
    """HTTP endpoint -> FastAPI router; later lines are mounted later."""
    reasoning_parsers: Registry[Any] = field(default_factory=lambda: _table("parsers", "REASONING_PARSERS"))
    """Name for --reasoning-parser -> class of a message parser (docs/how-to/add-a-parser.md)."""
    tool_parsers: Registry[Any] = field(default_factory=lambda: _table("parsers", "TOOL_PARSERS"))
    """Name for --tool-call-parser -> class of a message parser."""
    stat_loggers: Registry[Any] = field(default_factory=lambda: _table("stat_loggers", "STAT_LOGGERS"))
    """Stat logger -> `StatLogger` class, built in every front end."""
    executors: Registry[Any] = field(default_factory=lambda: _table("executors", "EXECUTORS"))
    """Executor -> class with `build(ExecutorSpec) -> Executor`."""


_loaded = False
_lock = threading.RLock()
"""Other threads wait until all plug-ins are loaded; the thread that loads them may look into tables meanwhile."""


def load_plugins() -> None:
    """Let each installed plug-in add its lines, once in a process; a second call, also one that a plug-in makes by
    looking something up, does nothing. PAGEMILL_PLUGINS (VLLM_PLUGINS) names those to load; empty: none."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if not _loaded:
            _loaded = True  # a plug-in that looks something up must not load all of them again
            _load_all(envs.plugins())


def _load_all(wanted: list[str] | None) -> None:
    if wanted is not None and not wanted:
        return
    found = [point for point in entry_points(group=GROUP) if wanted is None or point.name in wanted]
    catalogue = Catalogue()
    for point in found:
        _load(point, lambda register: register(catalogue))
    missing = {name for name in wanted or () if name not in {point.name for point in found}}
    if missing:
        _load_vllm_plugins(missing)


def _load_vllm_plugins(wanted: set[str]) -> None:
    """Those of the reference engine's groups that are named; what is in no group is reported."""
    general = [point for point in entry_points(group=VLLM_GENERAL_GROUP) if point.name in wanted]
    for point in general:
        _load(point, lambda function: function())
    unknown = wanted - {point.name for point in general}
    for group in VLLM_OTHER_GROUPS:
        for point in entry_points(group=group):
            if point.name in unknown:
                unknown.discard(point.name)
                logger.warning("plug-in %s skipped: a class of %s cannot be used by pagemill", point.name, group)
    for name in sorted(unknown):
        logger.warning("plug-in %s is not installed: no entry point of %s has that name", name, GROUP)


def _load(point: EntryPoint, call: Callable[[Any], None]) -> None:
    try:
        call(point.load())
    except Exception as error:  # somebody else's code: a server must not fail for it
        reason = " ".join(str(error).split())
        logger.warning("plug-in %s (%s) skipped: %s: %s", point.name, point.value, type(error).__name__, reason)
    else:
        logger.info("plug-in %s (%s) loaded", point.name, point.value)
