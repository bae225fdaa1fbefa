"""`FloatWeights`: which layers a quantized checkpoint has as floats, by its tensors. Knows no format and no file."""

from collections.abc import Collection, Mapping

import torch

from pagemill.model.loading.stored import FloatForm, LayerTensor
from pagemill.model.loading.weight_map import Target


class FloatWeights:
    """A layer is there as floats if its weight is, in the full shape, and nothing of what the format would store it in.

    In some formats a quantized weight has the same name and shape; then its type tells, where it is read.
    """

    def __init__(self, wanted: Mapping[Target, LayerTensor]) -> None:
        """`wanted`: what the model is stored in, by its description."""
        self._wanted = wanted
        forms = {target.kind: tensor.floats for target, tensor in wanted.items() if tensor.floats is not None}
        self._kinds = tuple(forms)
        """Of tensors that floats may be there in place of."""
        self._names = frozenset(form.stored.kind for form in forms.values())
        """What such floats are called."""
        self._met: dict[Target, FloatForm] = {}
        """Weights of the name and shape of floats."""
        self._are_floats: dict[Target, bool] = {}
        """Of those, whether they are, where the format's shape or the type has told."""

    def meant(self, target: Target, shape: tuple[int, ...]) -> LayerTensor | None:
        """What a tensor of this shape is taken for; None for one that has no place."""
        wanted = self._wanted.get(target)
        form = self._form(target) if target.kind in self._names else None
        if form is None or not (wanted is None or form.stored.takes(shape)):
            return wanted
        self._met[target] = form
        if wanted is not None and wanted.stored.takes(shape):
            return wanted
        self._are_floats[target] = True
        return LayerTensor(form.stored, target.shard, form.part)

    def known(self, target: Target, dtype: torch.dtype, meant: LayerTensor) -> LayerTensor:
        """The same, now that a tensor's type is known."""
        form = self._met.get(target)
        if form is None:
            return meant
        if target not in self._are_floats:
            self._are_floats[target] = dtype in form.stored.dtypes
        return LayerTensor(form.stored, target.shard, form.part) if self._are_floats[target] else meant

    def outcome(self, seen: Collection[Target]) -> tuple[set[Target], list[Target]]:
        """(tensors of the format that need not be there, tensors of weights that are there in both forms), by all
        that were met."""
        spared: set[Target] = set()
        doubled: list[Target] = []
        for target, form in self._met.items():
            others = [Target(target.layer, kind, target.shard) for kind in form.kinds if kind != target.kind]
            found = [other for other in others if other in seen]
            # Of a weight that another rank reads, the type is not known.
            if self._are_floats.get(target, not found):
                spared.update(others)
                doubled += [target, *found] if found else []
        return spared, doubled

    def _form(self, target: Target) -> FloatForm | None:
        """That of a weight of this name."""
        for kind in self._kinds:
            tensor = self._wanted.get(Target(target.layer, kind, target.shard))
            if tensor is not None and tensor.floats is not None and tensor.floats.stored.kind == target.kind:
                return tensor.floats
        return None
