"""Products of packed_layer.py in PTX: all tiles of a matrix that a program owns, from the ring to sums. Knows
registers, not layers.

A thread of mma.sync (m16n8k16) gives two pairs of inputs of rows g and g + 8 of the one operand and of column g of the
other, g being its number divided by four. In which order the inputs are counted is free if both count alike: here a
thread has 4 words that follow each other, of each of its two rows, and for each of the four integers in a word the 8
inputs that these are for. A warp has spans of 128 inputs to itself, every w-th of 32, whose inputs stay in registers.

Integers are not converted. Four bits in the lowest place of a bfloat16 are their value times 2^-133, four in the place
above are 16 times that: a number below the normal ones or just above them, which the tensor cores take exactly. So two
of four integers of a word are had by a mask, and two by a shift and a mask. Inputs are 2^64 times as large to make up
for it, 2^60 times where integers are in the upper place, and sums are multiplied by 2^69 in the end. 8 was added to
integers: sums begin with -8 times the sum of the inputs.

Inputs that other programs of the same launch write show by themselves that they are there: with a factor of 2^64 none
needs to be less than 2, so of every one the second highest bit is set, and what was not written yet is 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARGS = gl.constexpr("=r,l,r,r,l,r,r,r,r,r,r")
"""Of `products`."""


@gluon.constexpr_function
def places(stages, rows, w):
    """KiB at which things begin in shared memory, after the ring: scales, sums, barriers, sums of squares, the end."""
    scales = 32 * stages
    sums = scales + 2 * stages
    bars = sums + rows * w
    return scales, sums, bars, bars + 1, bars + 1 + rows


@gluon.constexpr_function
def _declared(spans, rows):
    return [
        ".reg .pred done, one, kept, more, has, given, added, norm, todo<4>, real<4>;",
        ".reg .b32 tid, lane, warp, g, q, z, a0, a1, b0, b1, s0, s1, v0, v1;",
        ".reg .b32 at, left, tries, number, half, stage, parity, full;",
        ".reg .b64 wide, px, ph;",
        f".reg .b32 x<{16 * spans}>, w<{8 * spans}>, t<8>, n<2>, p<2>;",
        f".reg .f32 zero, h<{rows}>, o<4>, r<4>, e<4>, f<{2 * spans}>, k<{2 * spans}>, c<{4 * spans}>, d<{4 * spans}>;",
        "mov.f32 zero, 0f00000000;",
        "mov.b32 n0, 0x80088008;",  # -8, in both places
        "mov.b32 n1, 0x80808080;",
        "mov.b32 p0, 0x5f805f80;",  # 2^64 and 2^60
        "mov.b32 p1, 0x5d805d80;",
        "mov.u32 tid, %tid.x;",
        "and.b32 lane, tid, 31;",
        "shr.u32 warp, tid, 5;",
        "shr.u32 g, lane, 2;",
        "and.b32 q, lane, 3;",
        "setp.eq.u32 one, lane, 0;",
        "mov.u32 z, global_smem;",
    ]


@gluon.constexpr_function
def _addresses(rows):
    """px: this thread's inputs; a0, a1: its words of a tile, s0, s1: its scales, both in lines that are swizzled; left:
    its sums."""
    return [
        f"and.b32 at, g, {rows - 1};",
        "min.u32 at, at, $2;",
        "mul.lo.u32 at, at, $5;",
        "mad.lo.u32 at, warp, 256, at;",
        "mad.lo.u32 at, q, 16, at;",
        "cvt.u64.u32 wide, at;",
        "add.u64 px, wide, $1;",
        "shr.u32 at, g, 1;",
        "and.b32 a0, g, 1;",
        "shl.b32 a0, a0, 2;",
        "add.u32 a0, a0, q;",
        "xor.b32 a0, a0, at;",
        "shl.b32 a0, a0, 4;",
        "mad.lo.u32 a0, at, 128, a0;",
        "xor.b32 a1, a0, 64;",
        "mad.lo.u32 at, warp, 1024, z;",
        "add.u32 a0, a0, at;",
        "add.u32 a1, a1, at;",
        "shr.u32 s0, g, 2;",
        "shr.u32 at, warp, 1;",
        "and.b32 at, at, 3;",
        "xor.b32 s0, s0, at;",
        "shl.b32 s0, s0, 4;",
        "and.b32 at, g, 3;",
        "mad.lo.u32 s0, at, 4, s0;",
        "xor.b32 s1, s0, 32;",
        "mad.lo.u32 at, warp, 64, z;",
        "add.u32 s0, s0, at;",
        "add.u32 s1, s1, at;",
        f"mad.lo.u32 left, warp, {64 * rows}, z;",
        f"mad.lo.u32 left, g, {4 * rows}, left;",
        "mad.lo.u32 left, q, 8, left;",
        f"setp.lt.u32 kept, q, {max(1, rows // 2)};",
    ]


@gluon.constexpr_function
def _awaited(w, partial):
    """Inputs, until all are there; those of earlier launches are, and get their factor. Beyond the last ones, 0."""
    lines = ["mov.u32 tries, 0;"]
    spans = 32 // w
    for s in range(spans):
        lines += [f"add.u32 at, warp, {s * w};", f"setp.lt.u32 real{s}, at, $6;", f"mov.pred todo{s}, real{s};"]
    if partial:
        lines += [f"mov.b32 x{i}, 0;" for i in range(16 * spans)]
    lines += ["ASK:"]
    for s in range(spans):
        for plane in range(4):
            regs = ", ".join(f"x{16 * s + 4 * plane + i}" for i in range(4))
            lines += [f"@todo{s} ld.relaxed.gpu.global.v4.b32 {{{regs}}}, [px+{s * w * 256 + plane * 64}];"]
    lines += ["@!given bra EARLIER;"]
    for s in range(spans):
        lines += [f"and.b32 at, x{16 * s}, 0x40004000;"]
        lines += [f"lop3.b32 at, at, x{16 * s + i}, x{16 * s + i + 1}, 0x80;" for i in range(1, 15, 2)]
        lines += [f"and.b32 at, at, x{16 * s + 15};", f"setp.ne.and.u32 todo{s}, at, 0x40004000, real{s};"]
    lines += ["mov.pred more, todo0;"] + [f"or.pred more, more, todo{s};" for s in range(1, spans)]
    lines += [
        "vote.sync.any.pred more, more, 0xffffffff;",
        "@!more bra HERE;",
        "add.u32 tries, tries, 1;",
        "setp.gt.u32 done, tries, $3;",
        "@done trap;",
        "bra ASK;",
        "EARLIER:",
    ]
    lines += [f"mul.rn.bf16x2 x{i}, x{i}, p{i // 4 % 2};" for i in range(16 * spans)]
    return [*lines, "HERE:"]


@gluon.constexpr_function
def _mma(name, first, left, right, sums):
    """name0..3, from `first` on, = sums + left x right."""
    target = ", ".join(f"{name}{first + i}" for i in range(4))
    return (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{{{target}}}, {{{left}}}, {{{right}}}, {{{sums or target}}};"
    )


@gluon.constexpr_function
def _begun(w):
    """What sums begin with, f0.., of two columns for each span."""
    lines = []
    for s in range(32 // w):
        for plane in range(4):
            left = ", ".join([f"n{plane % 2}"] * 4)
            for half, name in enumerate("re"):
                begin = 16 * s + 4 * plane + 2 * half
                sums = "zero, zero, zero, zero" if plane == 0 else None
                lines += [_mma(name, 0, left, f"x{begin}, x{begin + 1}", sums)]
        lines += [f"add.f32 f{2 * s}, r0, e0;", f"add.f32 f{2 * s + 1}, r1, e1;"]
    return lines


@gluon.constexpr_function
def _multiplied(s, plane):
    lines = []
    for i in range(8):
        word = f"w{8 * s + i}"
        if plane == 2:
            lines += [f"shr.u32 {word}, {word}, 8;"]
        lines += [f"and.b32 t{i}, {word}, {('0x000f000f', '0x00f000f0')[plane % 2]};"]
    for half, name in enumerate("cd"):
        left = f"t{2 * half}, t{4 + 2 * half}, t{2 * half + 1}, t{5 + 2 * half}"
        begin = 16 * s + 4 * plane + 2 * half
        sums = None
        if plane == 0:
            sums = "zero, zero, zero, zero" if half else f"f{2 * s}, f{2 * s + 1}, f{2 * s}, f{2 * s + 1}"
        lines += [_mma(name, 4 * s, left, f"x{begin}, x{begin + 1}", sums)]
    return lines


@gluon.constexpr_function
def _summed(rows, w, sums):
    """Sums of all spans, times their scales, into their place, or added to what is there."""
    kind = "f32" if rows == 1 else "v2.f32"
    pairs = ("{o0}", "{o2}") if rows == 1 else ("{o0, o1}", "{o2, o3}")
    lines = ["mov.f32 o0, zero;", "mov.f32 o1, zero;", "mov.f32 o2, zero;", "mov.f32 o3, zero;"]
    for half, pair in enumerate(pairs):
        lines += [
            f"@added ld.shared.{kind} {pair}, [left+{sums + 32 * rows * half}];".replace("{o0}", "o0").replace(
                "{o2}", "o2"
            )
        ]
    for i in range(0, 4, 2 if rows == 1 else 1):
        for total, name in (("r", "c"), ("e", "d")):
            lines += [f"mul.f32 {total}{i}, {name}{i}, k{i // 2};"]
            lines += [
                f"fma.rn.f32 {total}{i}, {name}{4 * s + i}, k{2 * s + i // 2}, {total}{i};" for s in range(1, 32 // w)
            ]
        lines += [f"add.f32 r{i}, r{i}, e{i};", f"fma.rn.f32 r{i}, r{i}, 0f62000000, o{i};"]
    first, second = ("r0", "r2") if rows == 1 else ("{r0, r1}", "{r2, r3}")
    return [
        *lines,
        f"@kept st.shared.{kind} [left+{sums}], {first};",
        f"@kept st.shared.{kind} [left+{sums + 32 * rows}], {second};",
    ]


@gluon.constexpr_function
def _tile(rows, w, stages):
    """The next tile of the ring, times this warp's inputs, into the sums, and its place in the ring given back."""
    scales, sums, bars = (1024 * place for place in places(stages, rows, w)[:3])
    lines = [
        "mad.lo.u32 full, stage, 8, z;",
        "WAIT:",
        f"mbarrier.try_wait.parity.shared::cta.b64 done, [full+{bars}], parity;",
        "@!done bra WAIT;",
    ]
    lines += [f"mad.lo.u32 b{i}, stage, 32768, a{i};" for i in range(2)]
    lines += [f"mad.lo.u32 v{i}, stage, 2048, s{i};" for i in range(2)]
    for s in range(32 // w):
        for half in range(2):
            regs = ", ".join(f"w{8 * s + 4 * half + i}" for i in range(4))
            lines += [f"ld.shared.v4.b32 {{{regs}}}, [b{half}+{s * w * 1024 + 512 * half}];"]
        lines += [f"ld.shared.f32 k{2 * s + i}, [v{i}+{scales + s * w * 64}];" for i in range(2)]
    for s in range(0, 32 // w, 2):
        for plane in range(4):
            lines += _multiplied(s, plane) + _multiplied(s + 1, plane)
    return [
        *lines,
        "bar.warp.sync 0xffffffff;",
        f"@one mbarrier.arrive.shared::cta.b64 _, [full+{bars + 8 * stages}];",
        *_summed(rows, w, sums),
        f"add.u32 left, left, {64 * rows * w};",
        "add.u32 stage, stage, 1;",
        f"setp.eq.u32 more, stage, {stages};",
        "@more mov.u32 stage, 0;",
        "@more xor.b32 parity, parity, 1;",
    ]


@gluon.constexpr_function
def _squares_asked(rows):
    return [f"@more ld.relaxed.gpu.global.f32 h{row}, [ph+{1024 * row}];" for row in range(rows)]


@gluon.constexpr_function
def _squares_kept(rows, place):
    """Sums of squares of each row into shared memory, as soon as they are there."""
    lines = ["mov.u32 tries, 0;"]
    for row in range(rows):
        lines += [
            f"setp.ge.and.u32 more, $2, {row}, has;",
            f"SQUARE{row}:",
            f"setp.eq.and.f32 done, h{row}, 0f00000000, more;",
            f"@!done bra KNOWN{row};",
            f"ld.relaxed.gpu.global.f32 h{row}, [ph+{1024 * row}];",
            "add.u32 tries, tries, 1;",
            "setp.gt.u32 done, tries, $3;",
            "@done trap;",
            f"bra SQUARE{row};",
            f"KNOWN{row}:",
        ]
    lines += ["mad.lo.u32 at, tid, 4, z;"]
    return lines + [f"@has st.shared.f32 [at+{place + 1024 * row}], h{row};" for row in range(rows)]


@gluon.constexpr_function
def products(rows, w, stages, partial):
    """The text, the same for all products: code that runs for the first time comes from far. Operands: $1 inputs, 64
    bits; $2 rows less one; $3 how often to look for inputs; $4 sums of squares, [8, 256], 64 bits; $5 bytes of a row of
    inputs; $6 spans of 128 inputs that there are; $7 tiles; $8 the first step; $9 slots of the ring's sums that are
    skipped after half of the tiles; $10: 1 if inputs are of this launch, 2 if sums are added to those of before, 4 if
    sums of squares are waited for, and go to shared memory. `partial`: there may be less than 32 spans."""
    lines = _declared(32 // w, rows)
    lines += ["and.b32 at, $10, 1;", "setp.ne.u32 given, at, 0;", "and.b32 at, $10, 2;", "setp.ne.u32 added, at, 0;"]
    lines += ["and.b32 at, $10, 4;", "setp.ne.u32 norm, at, 0;", "setp.lt.and.u32 has, tid, 256, norm;"]
    lines += _addresses(rows)
    lines += [f"rem.u32 stage, $8, {stages};", f"div.u32 parity, $8, {stages};", "and.b32 parity, parity, 1;"]
    lines += ["mul.wide.u32 ph, tid, 4;", "add.u64 ph, ph, $4;", "shr.u32 half, $7, 1;"]
    lines += [f"mov.f32 h{row}, 0f00000000;" for row in range(rows)]
    lines += [*_awaited(w, partial), *_begun(w), "mov.u32 number, 0;", "NEXT:"]
    lines += ["setp.eq.and.u32 more, number, 1, has;", *_squares_asked(rows), *_tile(rows, w, stages)]
    lines += [
        "add.u32 number, number, 1;",
        "setp.eq.u32 more, number, half;",
        f"@more mad.lo.u32 left, $9, {64 * rows * w}, left;",
        "setp.lt.u32 more, number, $7;",
        "@more bra NEXT;",
        "@!norm bra END;",
        *_squares_kept(rows, 1024 * places(stages, rows, w)[3]),
        "END:",
    ]
    return "{\n" + "\n".join(lines) + "\nmov.u32 $0, 0;\n}"


@gluon.constexpr_function
def barriers(stages, rows, w):
    """The text: one thread makes the barriers, of each stage that a tile is there, and then that it is free."""
    bars = 1024 * places(stages, rows, w)[2]
    lines = [
        ".reg .pred one;",
        ".reg .u32 z;",
        "mov.u32 z, %tid.x;",
        "setp.eq.u32 one, z, 0;",
        "mov.u32 z, global_smem;",
    ]
    for index in range(2 * stages):
        count = 1 if index < stages else w
        lines += [f"@one mbarrier.init.shared::cta.b64 [z+{bars + 8 * index}], {count};"]
    return "{\n" + "\n".join(lines) + "\nfence.mbarrier_init.release.cluster;\nmov.u32 $0, 0;\n}"
