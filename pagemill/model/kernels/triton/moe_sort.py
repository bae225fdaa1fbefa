"""Slots (a token and one of its experts) in the order of experts, and the tiles that cover them, without a look at the
host: every grid depends on shapes alone.

One kernel, a program an expert: each counts for itself what comes before it, so that none waits for another.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch

_MAX_BLOCK = 8192
"""Slots that a program looks at together, at most."""
_TILES = 32
"""Tiles that it writes together."""


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """S slots, of which those of experts elsewhere are left out, and tiles of up to `tile_rows` slots of one expert."""

    slots: Tensor
    """[S] int32: the slots by expert, in order within one; the end is not written when some are left out."""
    tiles: Tensor
    """[3, max tiles] int32: expert, place in `slots`, and number of slots of each tile; 0 slots in those not needed,
    which may be anywhere."""
    tile_rows: int

    @property
    def max_tiles(self) -> int:
        """Tiles that there may be."""
        return self.tiles.shape[1]


@triton.jit(do_not_specialize=["num_slots", "max_tiles"])
def _sort(
    sorted_slots, tiles, chosen, num_slots, first, max_tiles,
    N: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: an expert, its slots to their places, and its tiles."""
    me = tl.program_id(0)
    expert = first + me
    lanes = tl.arange(0, BLOCK)
    before, mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in range(0, num_slots, BLOCK):
        other = tl.load(chosen + start + lanes, start + lanes < num_slots, -1)
        before += ((other >= first) & (other < expert)).to(tl.int32)
        mine += (other == expert).to(tl.int32)
    begin, count = tl.sum(before, 0), tl.sum(mine, 0)

    place = begin
    for start in range(0, num_slots, BLOCK):
        slot = start + lanes
        is_mine = tl.load(chosen + slot, slot < num_slots, -1) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(sorted_slots + place + rank - 1, slot, is_mine)
        place += tl.max(rank, 0)

    # This many tiles are enough for all experts before this one, whatever each has: a sum of quotients rounded up is
    # not more than that of all rounded down and one more for each.
    tile = begin // TILE + me
    end = tl.where(me == N - 1, max_tiles, (begin + count) // TILE + me + 1)
    for start in range(0, end - tile, TILES):
        number = start + tl.arange(0, TILES)
        places = tiles + tile + number
        inside = number < end - tile
        rows = tl.minimum(tl.maximum(count - number * TILE, 0), TILE)
        tl.store(places, tl.zeros([TILES], tl.int32) + me, inside)
        tl.store(places + max_tiles, begin + number * TILE, inside)
        tl.store(places + 2 * max_tiles, rows, inside)


def sort_slots(chosen: Tensor, first: int, num_experts: int, tile_rows: int) -> SortedSlots:
    """The slots of [T, K] chosen experts (int32, contiguous) by expert, for experts first .. first + num_experts."""
    num_slots = chosen.numel()
    device = chosen.device
    max_tiles = num_slots // tile_rows + num_experts
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    tiles = torch.empty(3, max_tiles, dtype=torch.int32, device=device)
    block = min(_MAX_BLOCK, max(256, launch.power_of_two(num_slots)))
    launch.on(_sort, (num_experts,))(
        slots, tiles, chosen, num_slots, first, max_tiles, N=num_experts, TILE=tile_rows, TILES=_TILES, BLOCK=block,
        PDL=launch.dependent(), **launch.options(min(16, block // 256)),
    )  # fmt: skip
    return SortedSlots(slots, tiles, tile_rows)
