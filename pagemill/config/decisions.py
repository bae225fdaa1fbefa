"""`Decision`: a default that was filled in, and why. `Decisions` collects them while settings are resolved."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Decision:
    """One default that was filled in."""

    field: str
    value: Any
    why: str


class Decisions:
    """What `resolve` decided so far, in order."""

    def __init__(self) -> None:
        self._made: list[Decision] = []

    def note(self, field: str, value: T, why: str) -> T:
        """Record that the field gets this value, and return the value."""
        self._made.append(Decision(field, value, why))
        return value

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._made)


def completed(kind: type[T], asked: Any, **filled: Any) -> T:
    """The resolved half of a section: what was asked, with every field that `kind` names again in `filled`. Raises
    TypeError for a field that is missing there."""
    open_fields = kind.__annotations__
    kept = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    return kind(**{name: value for name, value in kept.items() if name not in open_fields}, **filled)
