"""Figures of `measure` as a table and as values by name. Knows names of figures, not how they came about."""

from statistics import median
from typing import Any

from pagemill.bench.scheduler.measure import Measured, Side, Values


def figures(measured: Measured) -> dict[str, Any]:
    """Flat: the median of each of our figures, `ratio_*` = theirs / ours of each that both have (the median over
    repetitions of the ratios within one); then their medians, the spread (least, most) of all, and the settings."""
    own = measured.own
    peer = measured.peer
    ratios = {} if peer is None else ratio_values(own.values, peer.values)
    result: dict[str, Any] = {name: median(values) for name, values in (own.values | ratios).items()}
    result["num_cached_blocks"] = measured.num_cached_blocks
    result["spread"] = _spread(own.values | ratios)
    result["settings"] = own.settings
    if peer is not None:
        medians = {name: median(values) for name, values in peer.values.items()}
        result["peer"] = medians | {"spread": _spread(peer.values), "settings": peer.settings}
    return result


def ratio_values(own: Values, peer: Values) -> Values:
    """Theirs / ours in each repetition, named `ratio_256` for `step_ms_256`, `ratio_admit_32k` for `admit_32k_ms`."""
    return {
        ratio_name(name): [theirs / ours for ours, theirs in zip(values, peer[name], strict=True)]
        for name, values in own.items()
        if name in peer
    }


def ratio_name(name: str) -> str:
    """The ratio's name of a figure."""
    return "ratio_" + name.removeprefix("step_ms_").removesuffix("_ms")


def table(measured: Measured) -> str:
    """One line per figure: median and, in brackets, least and most; then the settings of either side."""
    own = measured.own
    peer = measured.peer
    sides = [own] if peer is None else [own, peer]
    ratios = {} if peer is None else ratio_values(own.values, peer.values)
    rows = [["", *(side.settings["engine"] for side in sides), *(["ratio"] if ratios else [])]]
    for name in own.values:
        row = [name, *(_cell(side, name) for side in sides)]
        rows.append([*row, _range(ratios[ratio_name(name)])] if ratio_name(name) in ratios else row)
    rows.append(["num_cached_blocks", str(measured.num_cached_blocks)])
    widths = [max(len(row[column]) for row in rows if column < len(row)) + 2 for column in range(len(rows[0]))]
    lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return "\n".join([*lines, *(_settings_of(side) for side in sides)])


def _spread(values: Values) -> dict[str, list[float]]:
    return {name: [min(each), max(each)] for name, each in values.items()}


def _cell(side: Side, name: str) -> str:
    return _range(side.values[name]) if name in side.values else "-"


def _range(values: list[float]) -> str:
    middle, least, most = (f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in _three(values))
    return middle if least == most else f"{middle} ({least} - {most})"


def _three(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def _settings_of(side: Side) -> str:
    facts = ", ".join(f"{name}={value}" for name, value in side.settings.items() if name != "engine")
    return f"{side.settings['engine']}: {facts}"
