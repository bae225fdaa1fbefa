"""What packed_layer.py does in PTX: products of unpacked integers on the tensor cores, and a barrier over all programs.
Knows registers, not layers.

A thread of mma.sync (m16n8k16) gives two pairs of inputs of rows g and g + 8 of the one operand and of column g of the
other, g being its number divided by four. In which order the inputs are counted is free if both count alike: here a
thread has 8 words that follow each other, of each of its rows, and for each of the four integers in a word the 8 inputs
that these are for.
"""

from triton.experimental.gluon import language as gl

_PLANES = range(4)
"""Integers in a word."""


def _mma(name: str, left: str, inputs: int, plane: int, half: int) -> str:
    """`inputs`: the first of the operands that hold inputs, four for a plane."""
    sums = ", ".join(f"{name}{number}" for number in range(4))
    begin = inputs + 4 * plane + 2 * half
    right = f"${begin}, ${begin + 1}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{{left}}}, {{{right}}}, {{{sums}}};\n"


def _product() -> str:
    """Operands: 8 sums; words 8 to 15, four of each row; inputs 16 to 31; what sums begin with, 32 to 39."""
    lines = ["{ .reg .b32 t<8>; .reg .f32 c<4>, d<4>;\n"]
    lines += [f"mov.f32 {name}{number}, ${32 + number % 2};\n" for name in "cd" for number in range(4)]
    for plane in _PLANES:
        for word in range(8):
            lines += [f"shr.u32 t{word}, ${8 + word}, {4 * plane};\n"]
            lines += [f"lop3.b32 t{word}, t{word}, 0x000f000f, 0x43004300, 0xea;\n"]
        for half, name in enumerate("cd"):
            left = f"t{2 * half}, t{4 + 2 * half}, t{2 * half + 1}, t{5 + 2 * half}"
            lines += [_mma(name, left, 16, plane, half)]
    order = ("c0", "c1", "d0", "d1", "c2", "c3", "d2", "d3")
    return "".join(lines) + _given(order) + "}"


def _first_sum() -> str:
    """Operands: 8 times what sums begin with, of two columns by turns; inputs 8 to 23. -68 times the sum of the inputs,
    for each of two sums: 136 was added to the integers."""
    lines = ["{ .reg .b32 k; .reg .f32 c<4>, d<4>;\nmov.b32 k, 0xc288c288;\n"]
    lines += [f"mov.f32 {name}{number}, 0f00000000;\n" for name in "cd" for number in range(4)]
    for plane in _PLANES:
        for half, name in enumerate("cd"):
            lines += [_mma(name, "k, k, k, k", 8, plane, half)]
    lines += ["add.f32 c0, c0, d0;\nadd.f32 c1, c1, d1;\n"]
    return "".join(lines) + _given(("c0", "c1") * 4) + "}"


def _given(names: tuple[str, ...]) -> str:
    return "".join(f"mov.f32 ${number}, {name};\n" for number, name in enumerate(names))


def _constraints(kinds: str) -> str:
    return ",".join(["=f"] * 8 + [kind for kind in kinds for _ in range(8)])


PRODUCT = gl.constexpr(_product())
PRODUCT_ARGS = gl.constexpr(_constraints("rrrf"))
"""words, inputs of planes 0 and 1, of 2 and 3, what sums begin with; 8 registers of each, and of the sums."""
FIRST_SUM = gl.constexpr(_first_sum())
FIRST_SUM_ARGS = gl.constexpr(_constraints("rr"))
"""Inputs of planes 0 and 1, of 2 and 3."""

MEET = gl.constexpr("""{
    .reg .pred other, more;
    .reg .u32 thread, now, tries;
    .reg .s32 ahead;
    .reg .u64 place;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra POLL;
    mul.wide.u32 place, $2, 4;
    add.u64 place, place, $1;
    st.release.gpu.global.u32 [place], $3;
POLL:
    setp.ge.u32 other, thread, 128;
    @other bra MET;
    mul.wide.u32 place, thread, 4;
    add.u64 place, place, $1;
    mov.u32 tries, 0;
AGAIN:
    ld.acquire.gpu.global.u32 now, [place];
    sub.s32 ahead, now, $3;
    setp.ge.s32 more, ahead, 0;
    @more bra MET;
    add.u32 tries, tries, 1;
    setp.lt.u32 more, tries, $4;
    @more bra AGAIN;
    trap;
MET:
    mov.u32 $0, 0;
}""")
"""$1: flags of 128 programs; $2: this program; $3: its turn, which it shows and then sees of all others, each thread of
one; $4: so often they look, then the kernel ends with an error. Turns count on from launch to launch, and may wrap."""
MEET_ARGS = gl.constexpr("=r,l,r,r,r")
