"""Lists of CPUs as Linux and people write them, `0-3,8`. Knows nothing about which CPUs there are."""

from collections.abc import Iterable

MAX_CPU = 65_535


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8], sorted. Raises ValueError, with the part that is wrong, for anything else."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is not a CPU or a range of CPUs")
        begin = int(first)
        end = int(last or first)
        if begin > end or end > MAX_CPU:
            raise ValueError(f"{part.strip()!r} is not a range of CPUs")
        cpus += range(begin, end + 1)
    if len(set(cpus)) < len(cpus):
        raise ValueError(f"{text.strip()!r} names a CPU twice")
    return sorted(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """[0, 1, 2, 3, 8] -> `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
