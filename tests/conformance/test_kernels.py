"""Every native kernel, fuzzed on shapes of real models and on every instruction set of this CPU, against plain torch on
the same numbers in float32 or wider; and SmolLM2 in 4 bits against its weights dequantized.

Bounds follow from what the kernels round, and where: see each check, and kernel_shapes.py.
"""

from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagemill.artifacts.gguf_file import GgufTensor
from pagemill.model.kernels import native, reference
from pagemill.model.kernels.linear import GELU_TANH, SILU, PackedLinear, linear, pack_bf16
from pagemill.model.kernels.linear_int import FORMATS, pack_blocks
from pagemill.model.kernels.linear_reference import dequantized
from pagemill.model.kernels.torch_ops import linear_arguments
from pagemill.model.loading.sources.gguf_blocks import as_blocks
from pagemill.tokenizers.load import load_tokenizer
from tests.conformance.kernel_shapes import (
    BF16_UNIT,
    MODELS,
    Shapes,
    activations,
    blocks_of_bytes,
    generator,
    step_error,
    sum_error,
)
from tests.conformance.prompts import PROMPTS
from tests.fakes.paged import PagedModel
from tests.unit.model.kernels.conftest import Paged, make_paged
from tests.unit.model.kernels.cpu.test_sample import check as check_draws
from tests.unit.model.kernels.cpu.test_sample import settings_of

pytestmark = pytest.mark.conformance

EACH_MODEL = pytest.mark.parametrize("shapes", MODELS, ids=lambda shapes: shapes.name)
SEEDS = pytest.mark.parametrize("seed", range(2))
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where blocks of a type have their 16-bit scales."""
CONVERSION = {"Q4_K": 2.0**-10, "Q6_K": 0.5 / 127 + 2.0**-11}
"""Of a row's largest weight, what a weight may lose when its type is rearranged for the kernels."""
LINEAR_LAYERS = pytest.mark.parametrize(
    ("shapes", "type_name", "layer"),
    [
        pytest.param(shapes, type_name, layer, id=f"{shapes.name}-{type_name}-{layer}")
        for shapes in MODELS
        for type_name in ("BF16", *SCALES)
        for layer, (_, num_inputs) in shapes.linears.items()
        if type_name not in CONVERSION or num_inputs % 256 == 0
    ],
)
"""Types of CONVERSION have blocks of 256, of which a row has whole ones."""


def weight_of(type_name: str, sizes: tuple[int, int]) -> tuple[PackedLinear, Tensor]:
    """Panels, and the weight [N, K] that the file means, float64."""
    rows, cols = sizes
    if type_name == "BF16":
        weight = (torch.randn(sizes, generator=generator(rows, cols)) / cols**0.5).bfloat16()
        return pack_bf16(weight), weight.double()
    kind = gguf.GGMLQuantizationType[type_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = blocks_of_bytes(num_bytes, SCALES[type_name], rows, cols // elements, rows + cols)
    blocks = as_blocks(raw, GgufTensor("t", sizes, int(kind), 0, raw.nbytes))
    return pack_blocks(blocks.kind, blocks.blocks), torch.from_numpy(gguf.quants.dequantize(raw, kind)).double()


@cache
def linear_case(type_name: str, sizes: tuple[int, int]) -> tuple[PackedLinear, Tensor, Tensor, Tensor]:
    """Panels, x, x times the weight, and how far a kernel may be from it; made once for all instruction sets."""
    packed, weight = weight_of(type_name, sizes)
    g = generator(*sizes, len(type_name))
    x = activations(int(torch.randint(5, 30, (), generator=g)), sizes[1], g)
    wide, magnitudes = x.double(), x.double().abs()
    allowed = sum_error(magnitudes @ weight.abs().T, sizes[1])
    if type_name != "BF16":
        allowed += step_error(x, weight)
        loss = CONVERSION.get(type_name, 0.0) * weight.abs().amax(1)
        allowed += magnitudes.sum(1, keepdim=True) * loss
    return packed, x, wide @ weight.T, allowed


@LINEAR_LAYERS
def test_kernels_linear(isa: str, shapes: Shapes, type_name: str, layer: str) -> None:
    """What the inputs lose as 8-bit integers included; a row alone has the bits that it has in company."""
    sizes = shapes.linears[layer]
    packed, x, wanted, allowed = linear_case(type_name, sizes)
    found = linear(x, packed, torch.float32)
    error = (found.double() - wanted).abs()
    assert (error <= allowed).all(), float((error / allowed).max())
    for row in (0, len(x) - 1):
        assert torch.equal(linear(x[row : row + 1], packed)[0], found[row].bfloat16())


@EACH_MODEL
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
def test_kernels_linear_of_8_bit_inputs(isa: str, shapes: Shapes, type_name: str) -> None:
    """Against the same 8-bit inputs: products of integers are exact, and what is left is the float32 sum of one term
    for each block of 32, three roundings each (the block's sum, its scale, the addition)."""
    sizes = shapes.linears["qkv"]
    packed, _ = weight_of(type_name, sizes)
    panels, _, name, *_ = linear_arguments(packed)
    weight = dequantized(panels, name, sizes).double()
    x = activations(21, sizes[1], generator(*sizes))
    quants, factors = reference.quantize_rows(x)
    rounded = (quants.double() * factors).flatten(1)[:, : sizes[1]]
    # A weight with a minimum is a difference of two terms, which may be 16 times as large.
    terms = rounded.abs() @ weight.abs().T * (16 if type_name == "Q4_1" else 1)
    error = (linear(x, packed, torch.float32).double() - rounded @ weight.T).abs()
    assert (error <= sum_error(terms, 3 * sizes[1] // 32)).all()


@EACH_MODEL
@pytest.mark.parametrize("type_name", ["BF16", "Q8_0", "Q4_1"])
def test_kernels_gated_linear(isa: str, shapes: Shapes, type_name: str) -> None:
    """Gate, up, act(gate) and the product are rounded to bfloat16, each by BF16_UNIT. The activation makes a relative
    error of the gate x times as large: x * act'(x) / act(x), which is below 1 + |x| for SiLU and, for GELU, whose tail
    falls as 1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)), below 1 + 1.6 * |x| * (1 + 0.135 * x^2)."""
    rows, cols = 2 * shapes.inner, shapes.hidden
    number = SILU if shapes.gate == "silu" else GELU_TANH
    plain, _ = weight_of(type_name, (rows, cols))
    panels, _, name, *_ = linear_arguments(plain)
    if type_name == "BF16":
        fused = pack_bf16(dequantized(panels, name, (rows, cols)).bfloat16(), gate=number)
    else:
        raw = blocks_of_bytes(FORMATS[type_name].block_bytes, SCALES[type_name], rows, cols // 32, rows + cols)
        fused = pack_blocks(FORMATS[type_name], torch.from_numpy(raw), gate=number)
    x = activations(9, cols, generator(rows))
    gate, up = linear(x, plain, torch.float32).double().chunk(2, dim=1)
    size = gate.abs()
    if number == SILU:
        wanted, slope = functional.silu(gate) * up, 1 + size
    else:
        wanted, slope = functional.gelu(gate, approximate="tanh") * up, 1 + 1.6 * size * (1 + 0.135 * size.square())
    # In the tail 1 + tanh cancels: a few units of rounding, times the factors.
    tail = 8 * 2.0**-24 * size * up.abs() * slope
    allowed = 1.1 * wanted.abs() * BF16_UNIT * (3 + slope) + tail + 1e-30
    error = (linear(x, fused).double() - wanted).abs()
    assert (error <= allowed).all(), float((error / allowed).max())


def random_requests(g: torch.Generator, longest: int) -> list[tuple[int, int]]:
    """Requests that decode, and chunks of prompts: (tokens of the step, tokens of the sequence)."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    decoding = [(1, pick(1, longest)) for _ in range(pick(2, 6))]
    chunks = [(count, count + pick(0, longest)) for count in (pick(2, 130) for _ in range(2))]
    return [*decoding, *chunks, (pick(1, 50),) * 2]


def check_attention(case: Paged) -> None:
    """Keys and values are in their slots to the bit. float32: scores of up to 256 products, and sums of up to a
    sequence of weights. bfloat16: weights are rounded before they are multiplied, the result at the end; both are
    errors relative to the sum of the weights times the values' magnitudes."""
    found = case.run().double()
    rows = reference.unpacked_cache(case.kv_cache)
    block_size = rows.shape[3]
    blocks, offsets = case.slot_mapping // block_size, case.slot_mapping % block_size
    assert torch.equal(rows[0][blocks, :, offsets], case.key)
    assert torch.equal(rows[1][blocks, :, offsets], case.value)
    step = case.query_start, case.seq_lens, case.block_table, case.scale, case.window, case.soft_cap, case.chunk_size
    wanted = reference.paged_attention(case.query.float(), rows.float(), *step).double()
    sizes = torch.stack([rows[0], rows[1].abs()]).float()
    magnitudes = reference.paged_attention(case.query.float(), sizes, *step).double()
    # A score is off by sum_error, relative to |q| |k| * scale, and so is its weight; normal numbers stay below 30.
    scores = 30 * 8 * case.query.shape[2] ** 0.5 * 2.0**-24
    unit = 2.0**-18 + scores if case.query.dtype == torch.float32 else 2.1 * BF16_UNIT + scores
    error = (found - wanted).abs()
    assert (error <= unit * magnitudes + 1e-30).all(), float((error / (unit * magnitudes + 1e-30)).max())


@EACH_MODEL
@SEEDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cut", ["none", "window", "soft cap", "chunks"])
def test_kernels_paged_attention(isa: str, shapes: Shapes, dtype: torch.dtype, cut: str, seed: int) -> None:
    """Decoding and chunks of prompts in one batch, over shuffled blocks, with what must not be read NaN."""
    g = generator(seed, shapes.hidden, len(cut))
    window = (shapes.window or 200) if cut == "window" else None
    block_size = [16, 32][seed]
    lengths = random_requests(g, 1100 if cut in ("none", "window") else 500)
    settings = {"soft_cap": 50.0 if cut == "soft cap" else None, "chunk_size": 192 if cut == "chunks" else None}
    check_attention(make_paged(lengths, *shapes.heads, block_size, dtype, window, seed=seed, **settings))


def table_of(positions: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, size] of positions."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = (positions.unsqueeze(1) * frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@EACH_MODEL
@SEEDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_norms_rotary_activation(isa: str, shapes: Shapes, dtype: torch.dtype, seed: int) -> None:
    """Against float64. The unit is that of the type; every intermediate result that is rounded to it is one unit."""
    g = generator(seed, shapes.hidden)
    tokens, unit = int(torch.randint(1, 70, (), generator=g)), BF16_UNIT if dtype == torch.bfloat16 else 2.0**-23
    x, residual = (torch.randn(tokens, shapes.hidden, generator=g).to(dtype) * 3 for _ in range(2))
    weight = (torch.randn(shapes.hidden, generator=g) + 1).to(dtype)

    def norm(values: Tensor) -> Tensor:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * weight.double()

    def check(found: Tensor, wanted: Tensor, allowed: Tensor) -> None:
        error = (found.double() - wanted).abs()
        assert (error <= allowed + 1e-30).all(), float((error / (allowed + 1e-30)).max())

    # The normal form and the product; in float32 also the root and the mean, whose sum is over 16 lanes.
    wanted = norm(x.double())
    check(native.rms_norm(x, weight, 1e-6), wanted, 2.1 * unit * wanted.abs() + 8 * 2.0**-24 * wanted.abs())
    total = residual.clone()
    found = native.rms_norm(x, weight, 1e-6, total)
    assert torch.equal(total, x + residual)
    wanted = norm(total.double())
    check(found, wanted, 2.1 * unit * wanted.abs() + 8 * 2.0**-24 * wanted.abs())

    heads, _, size = shapes.heads
    query = torch.randn(tokens, heads, size, generator=g).to(dtype)
    cos, sin = table_of(torch.randint(2048, (tokens,), generator=g), size, dtype)
    wide, turned = query.double(), query.clone()
    native.rotate_(turned, cos, sin)
    crossed = torch.cat([-wide[..., size // 2 :], wide[..., : size // 2]], -1) * sin.double().unsqueeze(1)
    straight = wide * cos.double().unsqueeze(1)
    check(turned, straight + crossed, 2.1 * unit * (straight.abs() + crossed.abs()))

    pair = torch.randn(tokens, 2 * shapes.inner, generator=g).to(dtype) * 4
    gate, up = pair.double().chunk(2, dim=1)
    for gelu in (False, True):
        act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        tail = 8 * 2.0**-24 * gate.abs() * up.abs() * (1 + gate.abs())
        check(native.gated(pair, gelu), act * up, 2.1 * unit * (act * up).abs() + tail)


@EACH_MODEL
@SEEDS
def test_kernels_sampling(isa: str, shapes: Shapes, seed: int) -> None:
    """Flat and ordinary distributions over whole vocabularies, with every mixture of limits."""
    g = generator(seed, shapes.vocab)
    logits = torch.randn(6, shapes.vocab, generator=g) * [0.01, 4.0][seed]
    assert torch.equal(native.argmax(logits), logits.argmax(-1))
    assert torch.equal(native.argmax(logits.bfloat16()), logits.bfloat16().argmax(-1))
    check_draws(logits, settings_of(6, g), torch.rand(6, generator=g, dtype=torch.float64))


@pytest.fixture(scope="module")
def in_float32(smollm2_path: Path) -> tuple[list[int], Tensor]:
    """Tokens of a few prompts, and the logits after each with the weights dequantized and everything in float32."""
    tokenizer = load_tokenizer(smollm2_path)
    ids = [token for prompt in PROMPTS for token in tokenizer.encode(prompt + "\n")][:256]
    return ids, PagedModel.load(smollm2_path, "float32").logits(ids)


@pytest.fixture(scope="module")
def in_4_bits(smollm2_path: Path) -> PagedModel:
    return PagedModel.load(smollm2_path, "bfloat16")


@pytest.mark.model
def test_kernels_logits_of_smollm2_in_4_bits(
    isa: str, in_4_bits: PagedModel, in_float32: tuple[list[int], Tensor]
) -> None:
    """The same 4-bit weights, multiplied as such with inputs of 8 bits, in bfloat16 between the layers.

    Predictions are made of differences of logits, so their mean is taken off. An input that is rounded to a step of its
    block, the largest of 32 by 127, is off by 0.47% of a normal number, and one rounded to bfloat16 by 0.17%: if all
    that 121 linear layers and 60 sums of the residual add reached the end, it would be sqrt(121 * 0.47^2 + 60 * 0.17^2)
    = 5.3%. 4.5% is seen. Tokens may differ where the two best are closer than noise of that size, whose root mean
    square is 0.3 and three times that 0.9; predictions stay the same to 0.01 nats.
    """
    ids, wanted = in_float32
    found = in_4_bits.logits(ids, chunk=100)
    centred = [logits - logits.mean(-1, keepdim=True) for logits in (found.float(), wanted)]
    error = float((centred[0] - centred[1]).norm() / centred[1].norm())
    best = wanted.topk(2).values
    same, clear = found.argmax(-1) == wanted.argmax(-1), best[:, 0] - best[:, 1] > 0.9
    expected, ours = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    divergence = float((expected.exp() * (expected - ours)).sum(-1).mean())
    print(f"{isa}: relative error {error:.4f}, same token {same.float().mean():.3f}, divergence {divergence:.4f} nats")
    assert error < 0.065
    assert same[clear].all()
    assert same.float().mean() > 0.9
    assert divergence < 0.01
