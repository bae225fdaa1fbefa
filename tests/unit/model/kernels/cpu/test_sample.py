"""Draws of the native kernels against the reference, per instruction set."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels import native, reference

pytestmark = pytest.mark.cases(one_in=8)

SHAPES = [(1, 49_152), (5, 1000), (3, 17), (2, 1), (64, 600), (0, 64)]


def settings_of(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """All kinds of rows: with and without limits, cold and hot."""
    temperature = torch.rand(rows, generator=generator) * 1.5 + 0.2
    min_p = torch.tensor([0.0, 0.05, 0.5])[torch.randint(3, (rows,), generator=generator)]
    top_k = torch.tensor([0, 1, 5, 50, 10_000], dtype=torch.int32)[torch.randint(5, (rows,), generator=generator)]
    top_p = torch.tensor([1.0, 0.95, 0.3, 1e-6])[torch.randint(4, (rows,), generator=generator)]
    return temperature, min_p, top_k, top_p


def check(logits: Tensor, settings: tuple[Tensor, ...], uniforms: Tensor) -> None:
    """The reference's token, or the one that a number 1e-5 to the left or right would give: weights are float32."""
    found = native.sample(logits, *settings, uniforms)
    assert found.dtype == torch.int32
    near = [
        reference.sample(logits, *settings, (uniforms + delta).clamp(1e-12, 1 - 1e-12)) for delta in (-1e-5, 0, 1e-5)
    ]
    assert ((found >= near[0]) & (found <= near[2])).all(), (found.tolist(), near[1].tolist())
    assert (found == near[1]).float().mean() > 0.98 or len(found) < 50


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_draws(isa: str, shape: tuple[int, int], scale: float) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    for _ in range(3):
        logits = torch.randn(shape, generator=generator) * scale
        uniforms = torch.rand(shape[0], generator=generator, dtype=torch.float64)
        check(logits, settings_of(shape[0], generator), uniforms)


def test_equally_likely_tokens_are_kept_together(isa: str) -> None:
    logits = torch.full((9, 40), -1.0)
    logits[:, 10:20] = 2.0
    ones, uniforms = torch.ones(9), torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    tokens = native.sample(logits, ones, ones * 0, torch.full((9,), 3, dtype=torch.int32), ones, uniforms)
    assert tokens.tolist() == [10 + int(u * 10) for u in uniforms.tolist()]


@pytest.mark.parametrize("column", [0, 127, 128, 999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_nothing_is_drawn_from_what_is_no_distribution(isa: str, column: int, value: float | None) -> None:
    """One such number, or nothing but minus infinity: no token there, and the same as ever in the other rows."""
    generator = torch.Generator().manual_seed(column)
    logits = torch.randn(12, 1000, generator=generator)
    settings = settings_of(12, generator)
    uniforms = torch.rand(12, generator=generator, dtype=torch.float64)
    sound = native.sample(logits, *settings, uniforms)
    if value is None:
        logits[::2] = -torch.inf
    else:
        logits[::2, column] = value
    found = native.sample(logits, *settings, uniforms)
    assert found[::2].tolist() == reference.sample(logits, *settings, uniforms)[::2].tolist() == [-1] * 6
    assert torch.equal(found[1::2], sound[1::2])


def test_dropped_tokens_are_never_drawn(isa: str) -> None:
    """Those of a mask, and those beyond each of the limits, with numbers next to 0 and 1."""
    logits = torch.tensor([[-torch.inf, 3.0, 2.0, 1.0, -torch.inf]]).repeat(2, 1)
    low_high = torch.tensor([1e-300, 1 - 2**-53], dtype=torch.float64)
    ones, none = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    assert native.sample(logits, ones, ones * 0, none, ones, low_high).tolist() == [1, 3]
    assert native.sample(logits, ones, ones * 0, none + 2, ones, low_high).tolist() == [1, 2]
    assert native.sample(logits, ones, ones * 0, none, ones * 0.7, low_high).tolist() == [1, 2]
    assert native.sample(logits, ones, ones * 0.2, none, ones, low_high).tolist() == [1, 2]
    assert native.sample(logits, ones, ones * 0, none, ones * 1e-9, low_high).tolist() == [1, 1]


def test_a_row_that_is_part_of_a_wider_one_and_threads(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(33, 5000, generator=generator)
    settings, uniforms = settings_of(33, generator), torch.rand(33, generator=generator, dtype=torch.float64)
    alone = [
        native.sample(wide[r : r + 1, :4000], *(values[r : r + 1] for values in settings), uniforms[r : r + 1]).item()
        for r in range(33)
    ]
    assert native.sample(wide[:, :4000], *settings, uniforms).tolist() == alone


@pytest.mark.parametrize("shape", [(1, 49_152), (5, 1000), (3, 17), (40, 600)])
def test_choices_by_masks(isa: str, shape: tuple[int, int]) -> None:
    """The tokens of logits that were masked before, for rows with a mask and without, greedy ones and others."""
    generator = torch.Generator().manual_seed(shape[1])
    count, num_words = shape[0], -(-shape[1] // 32)
    words = torch.randint(-(2**31), 2**31, (count, num_words), generator=generator, dtype=torch.int32)
    words[:, ::2] = 0
    words[:, 0] = 1
    rows = torch.arange(count, dtype=torch.int32).flip(0)
    rows[1::3] = -1
    greedy = torch.arange(count) % 2 == 0
    settings, uniforms = settings_of(count, generator), torch.rand(count, generator=generator, dtype=torch.float64)
    logits = torch.randn(shape, generator=generator)
    before, masked = logits.clone(), logits.clone()
    for row, mask in enumerate(rows.tolist()):
        if mask >= 0:
            native.mask_(masked[row : row + 1], words[mask : mask + 1])
    expected = torch.where(greedy, native.argmax(masked), native.sample(masked, *settings, uniforms))
    assert native.choose(logits, greedy, settings, uniforms, words, rows).tolist() == expected.tolist()
    assert torch.equal(logits, before)
    near = reference.choose(logits, greedy, settings, uniforms, words, rows)
    assert (near == expected).float().mean() > 0.9 or count < 10


def test_masks_that_are_too_short_are_refused(isa: str) -> None:
    one, words = torch.ones(1), torch.zeros(1, 2, dtype=torch.int32)
    settings = (one, one * 0, torch.zeros(1, dtype=torch.int32), one)
    with pytest.raises(ValueError, match="2 words for 65 logits"):
        native.choose(torch.zeros(1, 65), one > 0, settings, one.double(), words, torch.zeros(1, dtype=torch.int32))
