"""`--cpu-threads-bind` as text: auto, nobind, or one list of CPUs per worker, `0-3|4-7`. Knows no machine."""

from collections.abc import Sequence

from pagemill.errors import ConfigError
from pagemill.utils.cpu_list import format_cpu_list, parse_cpu_list

AUTO = "auto"
NOBIND = "nobind"


def parse_lists(bind: str) -> tuple[tuple[int, ...], ...]:
    """The lists, in the order of the workers; none for auto and nobind. Raises ConfigError for other text, and for
    lists that share a CPU."""
    if bind in (AUTO, NOBIND):
        return ()
    lists: list[tuple[int, ...]] = []
    for part in bind.split("|"):
        try:
            cpus = parse_cpu_list(part)
        except ValueError as error:
            raise ConfigError(
                f"cpu_threads_bind={bind!r} is not allowed: {error}; use auto, nobind, or a list of CPUs per worker, "
                "such as 0-3|4-7"
            ) from error
        shared = sorted({cpu for other in lists for cpu in other} & set(cpus))
        if shared:
            raise ConfigError(
                f"cpu_threads_bind={bind!r} is not allowed: CPUs {format_cpu_list(shared)} are in two lists; workers "
                "do not share CPUs"
            )
        lists.append(tuple(cpus))
    return tuple(lists)


def join_lists(lists: Sequence[Sequence[int]]) -> str:
    """What `parse_lists` parses; nobind for no lists."""
    return "|".join(map(format_cpu_list, lists)) or NOBIND
