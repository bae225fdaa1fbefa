"""Norms, activations, rotary and argmax in Triton against plain torch, over odd sizes, strides and types."""

import pytest
import torch

from pagemill.model.kernels import ops, reference
from pagemill.model.kernels.kv_target import KVTarget
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from pagemill.model.kernels.triton import argmax as argmax_module, device, rotary  # isort: skip

pytestmark = pytest.mark.cases(one_in=6)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter rounds bfloat16 towards zero, and kernels round up to three times.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 5e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    step = ROUNDING[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("size", [8, slow(100), 576, slow(4096)])
@pytest.mark.parametrize("kind", ["plain", "residual", "float32 weight", "slice"])
def test_rms_norm(dtype: torch.dtype, num_tokens: int, size: int, kind: str):
    x = random(num_tokens, size + 16, dtype=dtype)[:, 16:] if kind == "slice" else random(num_tokens, size, dtype=dtype)
    weight = random(size, dtype=torch.float32 if kind == "float32 weight" else dtype, seed=1)
    residual = random(num_tokens, size, dtype=dtype, seed=2) if kind == "residual" else None
    copy = None if residual is None else residual.clone()
    close(device.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, copy))
    if residual is not None and copy is not None:
        close(residual, copy)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("num_heads", "size"), [(3, 64), (32, 128), (1, 80)])
def test_rms_norm_of_heads_in_a_wider_row(num_tokens: int, num_heads: int, size: int):
    x = random(num_tokens, num_heads + 2, size, dtype=torch.bfloat16)[:, 1:-1]
    weight = random(size, dtype=torch.bfloat16, seed=1)
    close(device.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 24), (3, 1500), (2, 2048)])
def test_gated(dtype: torch.dtype, gelu: bool, num_tokens: int, size: int):
    x = random(num_tokens, 2 * size + 8, dtype=dtype)[:, : 2 * size]
    close(device.gated(x, gelu), reference.gated(x, gelu))


@pytest.mark.parametrize(("num_rows", "size"), [(1, 5), (3, 31), (2, 64), (4, 5000)])
def test_mask(num_rows: int, size: int):
    logits = random(num_rows, size + 3)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-size // 32)), dtype=torch.int64, generator=generator)
    words[:, ::3] = 0
    words[:, 1::3] = -1
    words = words.int().to(DEVICE)
    expected = logits.clone()
    reference.mask_(expected[:, :size], words)
    device.mask_(logits[:, :size], words)
    assert torch.equal(logits, expected)


def test_no_tokens():
    assert device.rms_norm(random(0, 8), random(8), 1e-5).shape == (0, 8)
    assert device.gated(random(0, 8), False).shape == (0, 4)
    assert device.argmax(random(0, 8)).shape == (0,)
    device.mask_(random(0, 8), torch.zeros(0, 1, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_tables", [False, True])
@pytest.mark.parametrize(("num_heads", "size", "turned"), [(4, 64, 64), (9, 128, 128), (3, 96, 48), (2, 80, 80)])
def test_rotate(dtype: torch.dtype, wide_tables: bool, num_heads: int, size: int, turned: int):
    qkv = random(3, num_heads + 2, size, dtype=dtype)
    cos, sin = tables(3, turned, torch.float32 if wide_tables else dtype)
    expected = qkv.clone()
    device.rotate_(qkv[:, :num_heads], cos, sin)
    part = expected[:, :num_heads].float() if wide_tables else expected[:, :num_heads]
    reference.rotate_(part, cos, sin)
    expected[:, :num_heads] = part.to(dtype)
    close(qkv, expected)


def tables(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(num_tokens, size // 2, seed=3).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "size", "turned"),
    [(1, 4, 2, 64, 64), (2, 9, 3, 96, 64), (1, 2, 1, 128, 128), slow(65, 9, 3, 32, 32)],
)
@pytest.mark.parametrize("normed", [None, "rounded", "wide"])
def test_attention_inputs(
    dtype: torch.dtype, num_tokens: int, num_heads: int, num_kv_heads: int, size: int, turned: int, normed: str | None
):
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * size + 8, dtype=dtype)[:, :-8]
    rope = tables(num_tokens, turned, dtype)
    norms = None
    if normed is not None:
        kind = torch.float32 if normed == "wide" else dtype
        norms = (random(size, dtype=kind, seed=5), 1e-6), (random(size, dtype=kind, seed=6), 1e-5)
    expected = compose(qkv.clone(), num_heads, num_kv_heads, size, rope, norms)
    for actual, wanted in zip(device.attention_inputs(qkv, num_heads, size, rope, norms), expected, strict=True):
        assert actual is not None
        close(actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "most"), [(8, 4, 128), (6, 2, 1)])
def test_attention_inputs_in_parts(num_heads: int, num_kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rotary, "_ELEMENTS", most)
    qkv, rope = random(66, (num_heads + 2 * num_kv_heads) * 32), tables(66, 16, torch.float32)
    norms = (random(32, seed=5), 1e-6), (random(32, seed=6), 1e-5)
    expected = compose(qkv.clone(), num_heads, num_kv_heads, 32, rope, norms)
    for actual, wanted in zip(device.attention_inputs(qkv, num_heads, 32, rope, norms), expected, strict=True):
        assert actual is not None
        close(actual, wanted)


@pytest.mark.parametrize("num_tokens", [4, slow(65)])
@pytest.mark.parametrize("layout", ["block first", "halves first", "heads first"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention_inputs_written_to_the_cache(num_tokens: int, layout: str, cache_dtype: torch.dtype):
    num_heads, num_kv_heads, size, block_size, num_blocks = 4, 2, 64, 16, 9
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * size, dtype=torch.bfloat16)
    rope = tables(num_tokens, size, torch.bfloat16)
    slots = torch.randperm(block_size * num_blocks)[:num_tokens].to(DEVICE)
    slots[2] = -1
    small = cache_dtype.itemsize == 1
    scales = (torch.tensor([0.02], device=DEVICE), torch.tensor([2.0], device=DEVICE)) if small else (None, None)

    def target() -> KVTarget:
        shapes = {
            "block first": (num_blocks, 2, block_size, num_kv_heads, size),
            "halves first": (2, num_blocks, block_size, num_kv_heads, size),
            "heads first": (2, num_blocks, num_kv_heads, block_size, size),
        }
        cache = torch.zeros(shapes[layout], dtype=torch.float32, device=DEVICE).to(cache_dtype)
        keys, values = cache.unbind(1 if layout == "block first" else 0)
        if layout == "heads first":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return KVTarget(keys, values, slots, *scales)

    got, wanted = target(), target()
    query, key, value = device.attention_inputs(qkv, num_heads, size, rope, None, got)
    assert key is None and value is None
    expected = compose(qkv.clone(), num_heads, num_kv_heads, size, rope, None)
    close(query, expected[0])
    reference.write_kv(expected[1], expected[2], wanted)
    for name, scale in zip(("key_cache", "value_cache"), scales, strict=True):
        # The interpreter rounds float8 towards zero, and small ones to nothing. A difference of bfloat16 before the
        # division by the scale is as large after it: compare what the cache stands for.
        step = (0.13 if DEVICE == "cuda" else 0.5) if small else ROUNDING[torch.bfloat16]
        actual, cache = (getattr(one, name).float() * (1.0 if scale is None else scale) for one in (got, wanted))
        torch.testing.assert_close(actual, cache, rtol=step, atol=0.13 if small else step)


def compose(qkv, num_heads, num_kv_heads, size, rope, norms):
    query, key, value = qkv.view(len(qkv), -1, size).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query, key = reference.rms_norm(query, *norms[0]), reference.rms_norm(key, *norms[1])
    reference.rotate_(query, *rope)
    reference.rotate_(key, *rope)
    return query, key, value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (3, 2048), (2, 5000), (1, 40_000)])
@pytest.mark.parametrize("many", [1, 1024])
def test_argmax(dtype: torch.dtype, num_rows: int, vocab_size: int, many: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(argmax_module, "_MANY", many)
    logits = random(num_rows, vocab_size + 3, dtype=dtype)[:, :vocab_size]
    assert torch.equal(device.argmax(logits), first_largest(logits))


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    # torch.argmax on a GPU does not promise which of equals it takes.
    return logits.float().cpu().argmax(-1).to(DEVICE)


@pytest.mark.parametrize("many", [1, 1024])
def test_argmax_takes_the_first_of_equals_and_nothing_of_what_is_no_distribution(
    many: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(argmax_module, "_MANY", many)
    logits = torch.full((6, 5000), -1.0, device=DEVICE)
    logits[0, [7, 4000]] = 3.0
    logits[1, [30, 4999]] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    logits[3, 100] = -0.0
    logits[3, 200] = 0.0
    logits[4, 4999] = torch.inf
    out = torch.empty(6, dtype=torch.int32, device=DEVICE)
    assert device.argmax(logits, out) is out
    assert out.tolist() == [7, -1, -1, 100, -1, 0] == reference.argmax(logits).tolist()


def test_ops_on_a_cpu_are_the_composition(monkeypatch: pytest.MonkeyPatch):
    qkv, rope = random(3, 8 * 64), tables(3, 64, torch.float32)
    qkv, rope = qkv.cpu(), (rope[0].cpu(), rope[1].cpu())
    norms = (torch.rand(64), 1e-6), (torch.rand(64), 1e-6)
    expected = compose(qkv.clone(), 4, 2, 64, rope, norms)
    for actual, wanted in zip(ops.attention_inputs(qkv, 4, 64, rope, norms), expected, strict=True):
        assert actual is not None
        close(actual, wanted)
