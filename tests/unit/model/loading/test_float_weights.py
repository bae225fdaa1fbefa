"""A layer of a quantized checkpoint is there as floats, or in its format, as its tensors say; never both."""

import pytest
import torch

from pagemill.model.loading.float_weights import FloatWeights
from pagemill.model.loading.stored import FloatForm, LayerTensor, StoredTensor
from pagemill.model.loading.weight_map import Target

SHAPE = (32, 64)
FLOATS = StoredTensor("weight", SHAPE)
PACKED = {"weight_packed": StoredTensor("weight_packed", (32, 8), (torch.int32,))}
EIGHT = {"weight": StoredTensor("weight", SHAPE, (torch.float8_e4m3fn,))}
BYTES = {"weight": StoredTensor("weight", (1024, 1), (torch.uint8,))}
SCALE = {"weight_scale": StoredTensor("weight_scale", (1,))}
FORMATS = {"packed": PACKED | SCALE, "eight": EIGHT | SCALE, "bytes": BYTES | SCALE}


def target(kind):
    return Target("layers.0.mlp.gate", kind, 0)


class Met:
    """One layer of a file, whose tensors are met one by one."""

    def __init__(self, stored):
        form = FloatForm(FLOATS, None, tuple(stored))
        self.weights = FloatWeights(
            {target(kind): LayerTensor(tensor, 0, None, form) for kind, tensor in stored.items()}
        )
        self.seen = set()

    def meet(self, kind, shape, dtype=None):
        """What it is taken for. `dtype`: None where another rank reads it."""
        found = self.weights.meant(target(kind), shape)
        if found is not None:
            self.seen.add(target(kind))
        return found if found is None or dtype is None else self.weights.known(target(kind), dtype, found)

    def outcome(self):
        spared, doubled = self.weights.outcome(self.seen)
        return {one.kind for one in spared}, [one.kind for one in doubled]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_weight_alone_is_floats(name, dtype):
    """Also where its type is not known, since another rank reads it."""
    met = Met(FORMATS[name])
    found = met.meet("weight", SHAPE, dtype)
    if dtype is not None or name != "eight":
        assert found.stored is FLOATS
    assert met.outcome() == (set(FORMATS[name]) - {"weight"}, [])


@pytest.mark.parametrize("first", ["weight", "weight_scale"])
def test_a_quantized_weight_of_the_same_name_needs_its_scale(first):
    met = Met(FORMATS["eight"])
    for kind in sorted(FORMATS["eight"], reverse=first != "weight"):
        shape, dtype = (SHAPE, torch.float8_e4m3fn) if kind == "weight" else ((1,), torch.float32)
        assert met.meet(kind, shape, dtype).stored is FORMATS["eight"][kind]
    assert met.outcome() == (set(), [])
    alone = Met(FORMATS["eight"])
    alone.meet("weight", SHAPE, torch.float8_e4m3fn)
    assert alone.outcome() == (set(), []), "the scale is missed"
    packed = Met(FORMATS["packed"])
    packed.meet("weight_packed", (32, 8), torch.int32)
    assert packed.outcome() == (set(), [])


def test_the_shape_tells_where_it_can():
    met = Met(FORMATS["bytes"])
    assert met.meet("weight", (1024, 1), None).stored is FORMATS["bytes"]["weight"]
    assert met.outcome() == (set(), []), "the scale is missed, whoever reads the weight"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("first", ["weight", "weight_scale"])
def test_both_are_too_much(name, first):
    met = Met(FORMATS[name])
    for kind in sorted(["weight", "weight_scale"], reverse=first != "weight"):
        met.meet(kind, SHAPE if kind == "weight" else (1,), torch.float32)
    assert met.outcome()[1] == ["weight", "weight_scale"]


def test_another_rank_sees_that_a_weight_of_the_same_name_is_not_alone():
    met = Met(FORMATS["eight"])
    met.meet("weight", SHAPE)
    met.meet("weight_scale", (1,))
    assert met.outcome() == (set(), [])


def test_neither_shape_is_an_error_of_shape():
    met = Met(FORMATS["eight"])
    assert not met.meet("weight", (3, 3)).stored.takes((3, 3))
    assert not Met(FORMATS["packed"]).meet("weight", (3, 3)).stored.takes((3, 3))
    assert Met(FORMATS["packed"]).meet("bias", (3, 3)) is None
