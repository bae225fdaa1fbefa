"""How the attention kernels are cut, as data: sizes of tiles, warps and pipeline stages, by head size and role.

Knows no kernel. `CANDIDATES` is what `benchmarks/gpu_attention.py --tune` tries; `tiles_for` is what won.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tiles:
    """One way to launch `paged_attention`."""

    rows: int
    """Query heads x tokens of one program; a power of two, at least 16."""
    keys: int
    """Keys per turn of the loop; a power of two, at least 16."""
    warps: int
    stages: int
    """Of the loop's software pipeline. A key's load waits for that of its block id, so that the loads of
    (stages - 1) // 2 turns are under way at once: only odd numbers differ."""
    programs_per_sm: int = 2
    """That can be resident: what splitting aims at."""
    min_share: int = 64
    """Fewest keys for which a split is worth its merging."""

    def for_elements(self, num_bytes: int) -> "Tiles":
        """The same rows for query elements of this size. Float32, which no matrix unit multiplies exactly, gets what
        fits; it is for correctness, not for speed."""
        return self if num_bytes <= 2 else replace(self, keys=min(self.keys, 32), stages=1)


DECODE: dict[int, Tiles] = {
    64: Tiles(16, 64, 2, 3, programs_per_sm=8),
    128: Tiles(16, 64, 2, 3, programs_per_sm=4),
    256: Tiles(16, 32, 4, 5),
    512: Tiles(16, 32, 4, 3),
}
"""By head size, rounded up to a power of two; keys of 2 bytes or less."""
VERIFY: dict[int, Tiles] = {
    128: Tiles(32, 128, 4, 3, programs_per_sm=2),
}
"""As DECODE, for requests of several tokens whose heads are 32 rows."""
PREFILL: dict[int, Tiles] = {
    64: Tiles(128, 64, 8, 5),
    128: Tiles(128, 64, 8, 5),
    256: Tiles(128, 64, 8, 3),
    512: Tiles(64, 32, 8, 3),
}
CANDIDATES: dict[str, tuple[Tiles, ...]] = {
    "decode": tuple(
        Tiles(16, keys, warps, stages, residents, share)
        for keys in (32, 64, 128)
        for warps in (2, 4)
        for stages in (3, 5, 7)
        for residents, share in ((2, 64), (3, 128))
    ),
    "verify": tuple(
        Tiles(32, keys, warps, stages, residents)
        for keys in (32, 64, 128)
        for warps in (2, 4, 8)
        for stages in (3, 5)
        for residents in (2, 4, 6, 8)
    ),
    "prefill": tuple(
        Tiles(rows, keys, warps, stages)
        for rows in (64, 128)
        for keys in (64, 128)
        for warps in (4, 8)
        for stages in (3, 5)
    ),
}


def tiles_for(role: str, group: int, head_size: int, tokens: int = 1) -> Tiles:
    """The launch for a role, "decode" (with at most `tokens` query tokens per request) or "prefill".

    group: query heads per key head. At least one token's heads always fit into the rows.
    """
    table = DECODE if role == "decode" else PREFILL
    size = power_of_two(head_size)
    chosen = table[min(max(min(table), size), max(table))]
    rows = max(chosen.rows, power_of_two(group * tokens))
    if tokens > 1 and size in VERIFY and rows == VERIFY[size].rows:
        return VERIFY[size]
    if tokens > 1 and rows > chosen.rows:
        chosen = replace(chosen, warps=max(4, chosen.warps), programs_per_sm=min(4, chosen.programs_per_sm))
    return replace(chosen, rows=rows)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, number - 1).bit_length()


def split_budget(num_requests: int, slots: int) -> int:
    """Items beyond one per request into which a step's keys are split, so that all together fill the `slots` of the
    device, items that run at once, a whole number of times (one to four); of more requests than that, only long ones
    among short are split."""
    waves = -(-2 * num_requests // slots)
    return waves * slots - num_requests if waves <= 4 else max(1, num_requests // 2)
