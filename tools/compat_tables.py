"""What became of vLLM's flags and variables of the environment, and how many of each kind there are: docs/compat.md.

Knows the tables of the catalogue and the configuration; each entry is of exactly one kind, which a test holds.
"""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

from pagemill import envs
from pagemill.catalog import vllm_environment
from pagemill.catalog.vllm_flags import SECTIONS, SHORT_FLAGS
from pagemill.catalog.vllm_names import VERSION
from pagemill.config.arguments import ENGINE_SECTIONS
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.no_effect import IDLE, CompatConfig
from pagemill.config.refused_settings import ELSEWHERE, REFUSED_SETTINGS
from pagemill.config.server_config import ServerConfig
from tools.markdown import table


class Fate(StrEnum):
    """What becomes of a name that vLLM knows."""

    WORKS = "works"
    ELSEWHERE = "works under another name"
    IDLE = "cannot matter here"
    REFUSED = "refused"


OWN_FLAGS = {"config": "a YAML file of flags; those of the command line go before"}
"""Flags of `pagemill serve` that are no setting."""


def counts_table(bodies: Mapping[str, Any]) -> str:
    """How many names of each kind there are. `bodies`: path of an endpoint -> schema of its requests."""
    rows = [_count(f"flags of `vllm serve` {VERSION}", (fate_of_flag(name)[0] for _, name, _ in flags()))]
    rows.append(_count("variables `VLLM_*`", (fate for _, fate, _ in variables())))
    rows += [_count(f"fields of {path}", _fates_of_fields(body)) for path, body in bodies.items()]
    return table(("", *Fate, "all"), rows)


def _count(title: str, fates: Iterator[Fate]) -> tuple[str, ...]:
    counts = Counter(fates)
    return (title, *(str(counts[fate]) for fate in Fate), str(counts.total()))


def _fates_of_fields(body: Any) -> Iterator[Fate]:
    for name in {*body.model_fields, *body.refused, *body.hints}:
        yield Fate.IDLE if name in body.hints else Fate.REFUSED if name in body.refused else Fate.WORKS


def flags() -> Iterator[tuple[str, str, Any]]:
    """(section, keyword, default) of every flag of `vllm serve`."""
    for section, defaults in SECTIONS.items():
        for name, default in defaults.items():
            yield section, name, default


def fate_of_flag(name: str) -> tuple[Fate, str]:
    """What becomes of a setting, by its keyword, and why or where. Raises KeyError for one that nobody knows."""
    settings = _settings()
    if name in OWN_FLAGS:
        return Fate.WORKS, OWN_FLAGS[name]
    if name in settings:
        return Fate.WORKS, _difference(name, settings[name])
    idle = {field.name: field.metadata for field in dataclasses.fields(CompatConfig)}
    if name in idle:
        allowed = f" ({', '.join(idle[name]['choices'])})" if idle[name]["choices"] else ""
        return Fate.IDLE, idle[name]["help"] + allowed
    return (Fate.ELSEWHERE if name in ELSEWHERE else Fate.REFUSED), REFUSED_SETTINGS[name]


@cache
def _settings() -> dict[str, "dataclasses.Field[Any]"]:
    sections = (*ENGINE_SECTIONS.values(), ServerConfig, FleetConfig)
    return {field.name: field for cls in sections for field in dataclasses.fields(cls)}


def _difference(name: str, field: "dataclasses.Field[Any]") -> str:
    """Where a plain default is another one than theirs."""
    theirs = next(default for _, other, default in flags() if other == name)
    if theirs in (None, "", [], {}) or not isinstance(field.default, (str, int, float)) or field.default == theirs:
        return ""
    return f"default `{field.default}`; there `{theirs}`"


def flags_part() -> str:
    """Every flag of vLLM with what became of it, section by section."""
    text = (
        "\n## Flags\n\nFlags are keywords of `LLM` and `EngineArgs` too. [Those that work](reference/flags.md) are "
        "tested one by one. They may\nbe written with underscores, a field of a JSON object by itself "
        "(`--hf-overrides.rope_theta 1e6`), and all of them in a\nfile (`--config flags.yaml`). A refused flag is an "
        "error that says what to do; a keyword or a line of a file that has\nthe default of vLLM asks for nothing and "
        "is no error. Start-up tells what was given and cannot matter.\n"
    )
    short = {name: flag for flag, name in SHORT_FLAGS.items()}
    for section in SECTIONS:
        rows = []
        for of, name, _ in flags():
            if of == section:
                fate, why = fate_of_flag(name)
                shown = f"`{_flag(name)}`" + (f" `{short[name]}`" if name in short else "")
                rows.append((shown, str(fate), why))
        text += f"\n### {section}\n\n" + table(("flag", "here", "how, or why not"), rows)
    return text + _other_flags()


def _other_flags() -> str:
    """What is no flag of that release, and where flags that work cannot matter."""
    known = {name for _, name, _ in flags()}
    earlier = {name: why for name, why in REFUSED_SETTINGS.items() if name not in known}
    idle = [(f"`{_flag(name)}`", item.where, item.why) for item in IDLE for name in item.names]
    return (
        "\n### Earlier releases\n\n"
        + table(("flag", "instead"), ((f"`{_flag(name)}`", why) for name, why in earlier.items()))
        + "\n### Where flags that work cannot matter\n\nStart-up says so when they are given there.\n\n"
        + table(("flag", "where", "why it cannot matter"), idle)
        + f"\n{inspect.getdoc(CompatConfig)}\n\nAny other flag is an error.\n"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variables() -> Iterator[tuple[str, Fate, str]]:
    """(name without prefix, what becomes of it, how or why not) of each variable of vLLM's environment."""
    for name, meaning in sorted(_variables_read().items()):
        yield name, Fate.WORKS, meaning
    tables = (
        (Fate.ELSEWHERE, vllm_environment.ELSEWHERE),
        (Fate.IDLE, vllm_environment.IDLE),
        (Fate.REFUSED, vllm_environment.REFUSED),
    )
    for fate, entries in tables:
        for name in sorted(entries):
            yield name, fate, entries[name]


def _variables_read() -> dict[str, str]:
    """Those of vLLM that `pagemill.envs` reads, with what they do."""
    found = {}
    for name, function in inspect.getmembers(envs, inspect.isfunction):
        doc = " ".join((inspect.getdoc(function) or "").split())
        head = re.match(r"PAGEMILL_(\w+)(?:=\S+)?:? (.*)", doc)
        if head and not name.startswith("_") and head[1] in vllm_environment.READ:
            found[head[1]] = head[2].partition(". ")[0]
    return found


def environment_part() -> str:
    """Every variable that users of vLLM meet, with what became of it."""
    rows = ((f"`VLLM_{name}`", str(fate), why) for name, fate, why in variables())
    return (
        "\n## Environment\n\n`PAGEMILL_` in place of `VLLM_` means the same, and goes before. A variable that is set "
        "and not read is told at start-up,\nwith what stands here.\n\n"
        + table(("variable", "here", "how, or why not"), rows)
    )
