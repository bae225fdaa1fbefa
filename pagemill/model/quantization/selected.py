"""`Selected`: one method for the linear layers of a model but some. Knows no format."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pagemill.errors import ModelError
from pagemill.model.quantization.interface import Quantization, QuantMethod, Role

_MAX_NAMES = 20_000
_MAX_STARS = 8


class Selected(Quantization):
    """By name. Embeddings, routers and experts in one tensor are floats, and so is the output head unless the
    checkpoint says otherwise."""

    def __init__(
        self,
        linear: QuantMethod,
        floats: QuantMethod,
        *,
        skipped: Sequence[str] = (),
        only: Sequence[str] = (),
        head: bool = False,
    ) -> None:
        """`skipped`: layers that are floats: names, parts of names between dots, or patterns with *. `only`: ends of
        names; where there are any, no other layer is quantized. Raises ModelError for lists that are too long, and
        patterns that could take long."""
        names = [*skipped, *only]
        if len(names) > _MAX_NAMES or any(name.count("*") > _MAX_STARS for name in names):
            raise ModelError(
                f"quantization_config names {len(names)} layers; at most {_MAX_NAMES}, with {_MAX_STARS} * in each, "
                "are read"
            )
        self._linear = linear
        self._floats = floats
        self._exact = frozenset(name for name in skipped if "*" not in name)
        self._patterns = tuple(name for name in skipped if "*" in name)
        self._only = tuple(f".{name}" for name in only)
        self._head = head

    def method(self, module: str, role: Role) -> QuantMethod:
        if role is Role.HEAD:
            quantized = self._head and not self._is_skipped(module)
        else:
            is_meant = not self._only or f".{module}".endswith(self._only)
            quantized = role is Role.LINEAR and is_meant and not self._is_skipped(module)
        return self._linear if quantized else self._floats

    def _is_skipped(self, module: str) -> bool:
        parts = module.split(".")
        # A name stands for everything below it, and may leave out what is above: self_attn, layers.3.mlp.
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                if ".".join(parts[start:stop]) in self._exact:
                    return True
        return any(fnmatchcase(module, pattern) for pattern in self._patterns)
