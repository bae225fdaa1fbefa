"""Packed integers of 4 or 8 bits to floats, between shared memory and the tensor cores. Knows no product.

Nothing is converted: their bits are those of a float whose exponent makes its last place 1 (128 + u in bfloat16, 1024
+ u in float16), from which that constant and the zero point are subtracted, two at a time. Each 16-bit word holds 4 or
2 integers that are 32 inputs apart, so that what is taken from one place of each word multiplies 32 neighbouring
inputs, and nothing is rearranged.
"""

import triton
import triton.language as tl

_NIBBLES = """{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000f000f, MAGIC, 0xea;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000f000f, MAGIC, 0xea;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, MAGIC, 0xea;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000f000f, MAGIC, 0xea;
}"""
_NIBBLES_BF16 = tl.constexpr(_NIBBLES.replace("MAGIC", "0x43004300"))
_NIBBLES_FP16 = tl.constexpr(_NIBBLES.replace("MAGIC", "0x64006400"))
_BYTES_BF16 = tl.constexpr("""{
    .reg .b32 t, lo, hi, sixteen, minus;
    mov.b32 sixteen, 0x41804180;
    mov.b32 minus, 0xc510c510;
    lop3.b32 lo, $2, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $2, 4;
    lop3.b32 hi, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 hi, hi, sixteen, minus;
    mov.b32 t, 0x3f803f80;
    fma.rn.bf16x2 $0, hi, t, lo;
    shr.u32 t, $2, 8;
    lop3.b32 lo, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $2, 12;
    lop3.b32 hi, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 hi, hi, sixteen, minus;
    mov.b32 t, 0x3f803f80;
    fma.rn.bf16x2 $1, hi, t, lo;
}""")
"""16 * (128 + high) - 2304 + (128 + low): every step is exact."""
_BYTES_FP16 = tl.constexpr("""{
    .reg .b32 t, minus;
    mov.b32 minus, 0xe480e480;
    lop3.b32 t, $2, 0x00ff00ff, 0x64006400, 0xea;
    add.rn.f16x2 $0, t, minus;
    shr.u32 t, $2, 8;
    lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
    add.rn.f16x2 $1, t, minus;
}""")


@triton.jit
def four(words, TYPE: tl.constexpr, ASM: tl.constexpr):
    """[.., 32] int16 -> four times [.., 32]: the integers from 0 up, plus the constant of the type where ASM, else in
    float32."""
    if not ASM:
        made = ((words & 15).to(tl.float32), ((words >> 4) & 15).to(tl.float32), ((words >> 8) & 15).to(tl.float32),
                ((words >> 12) & 15).to(tl.float32))  # fmt: skip
    elif tl.bfloat16 == TYPE:
        made = tl.inline_asm_elementwise(
            _NIBBLES_BF16, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = tl.inline_asm_elementwise(
            _NIBBLES_FP16, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return made


_HALVES = """{
    .reg .b32 t, sign, size, factor, zero;
    mov.b32 factor, FACTOR;
    mov.b32 zero, 0x80008000;
""" + "".join(
    f"""
    shr.u32 t, $4, {4 * plane};
    shl.b32 sign, t, 12;
    and.b32 sign, sign, 0x80008000;
    shl.b32 size, t, SHIFT;
    lop3.b32 size, size, MASK, sign, 0xea;
    MULTIPLY ${plane}, size, factorADD;
    """
    for plane in range(4)
) + "}"  # fmt: skip


def _halves_of(factor: str, shift: int, mask: str, multiply: str, add: str) -> tl.constexpr:
    made = _HALVES.replace("FACTOR", factor).replace("SHIFT", str(shift)).replace("MASK", mask)
    return tl.constexpr(made.replace("MULTIPLY", multiply).replace("ADD", add))


_HALVES_BF16 = _halves_of("0x7f007f00", 6, "0x01c001c0", "fma.rn.bf16x2", ", zero")
_HALVES_FP16 = _halves_of("0x78007800", 9, "0x0e000e00", "mul.rn.f16x2", "")
"""The bits of e2m1 at the places of a wider float's lowest exponents, times the power of two between them: exact, also
of the one that is below the normal numbers."""


@triton.jit
def _half(bits):
    """int -> float32: twice an e2m1 float."""
    exponent = (bits >> 1) & 3
    last = bits & 1
    size = tl.where(exponent == 0, last, (2 + last) << tl.maximum(exponent - 1, 0))
    return tl.where((bits & 8) != 0, -size, size).to(tl.float32)


@triton.jit
def four_halves(words, TYPE: tl.constexpr, ASM: tl.constexpr):
    """[.., 32] int16 -> four times [.., 32]: twice the e2m1 floats, in float32 where not ASM."""
    if not ASM:
        wide = words.to(tl.int32)
        made = _half(wide), _half(wide >> 4), _half(wide >> 8), _half(wide >> 12)
    elif tl.bfloat16 == TYPE:
        made = tl.inline_asm_elementwise(
            _HALVES_BF16, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = tl.inline_asm_elementwise(
            _HALVES_FP16, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return made


@triton.jit
def planes_of(words, TYPE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr, ASM: tl.constexpr):
    """[.., 32] int16 -> the planes of a span, [.., 32] each."""
    if HALVES:
        made = four_halves(words, TYPE, ASM)
    elif BITS == 4:
        made = four(words, TYPE, ASM)
    else:
        made = two(words, TYPE, ASM)
    return made


@triton.jit
def two(words, TYPE: tl.constexpr, ASM: tl.constexpr):
    """[.., 32] int16 -> twice [.., 32]: integers of 8 bits around 0, in float32 where not ASM."""
    if not ASM:
        made = ((words & 255) - 128).to(tl.float32), (((words >> 8) & 255) - 128).to(tl.float32)
    elif tl.bfloat16 == TYPE:
        made = tl.inline_asm_elementwise(
            _BYTES_BF16, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        made = tl.inline_asm_elementwise(
            _BYTES_FP16, "=r,=r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    return made


@triton.jit
def added(values, offsets, ASM: tl.constexpr):
    """values [.., 32] + offsets [.., 32], two at a time."""
    if not ASM:
        made = values + offsets
    elif values.dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r", [values, offsets], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [values, offsets], tl.float16, is_pure=True, pack=2
        )
    return made


@triton.jit
def scaled(values, scales, ASM: tl.constexpr):
    """values [.., 32] * scales [.., 32], two at a time."""
    if not ASM:
        made = values * scales
    elif values.dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [values, scales], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [values, scales], tl.float16, is_pure=True, pack=2
        )
    return made
