"""Results of a benchmark as a table and as JSON. Knows names of figures, not what they mean."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError


def table(result: Any) -> str:
    """One line per figure of a dataclass; figures inside figures are named `outer inner`."""
    rows = list(_rows(dataclasses.asdict(result)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def write_json(path: Path, figures: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """The figures, preceded by what was asked for. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(json.dumps({"arguments": arguments, **figures}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _rows(figures: dict[str, Any], outer: str = "") -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if value is None:
            continue
        if isinstance(value, dict):
            yield from _rows(value, f"{name} ")
        else:
            yield outer + name, f"{value:.2f}" if isinstance(value, float) else str(value)
