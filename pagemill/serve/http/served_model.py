"""`ServedModel`: the model under the name that the API gives it."""

import msgspec

from pagemill.errors import ModelNotFoundError


class ServedModel(msgspec.Struct, frozen=True):
    """The model under the name that the API gives it."""

    name: str
    created: int
    """Unix time in seconds."""

    def check(self, requested: str | None) -> None:
        """Raises ModelNotFoundError unless the request means this model (or none in particular)."""
        if requested is not None and requested != self.name:
            raise ModelNotFoundError(f"the model {requested[:100]!r} is not served here; {self.name!r} is", "model")
