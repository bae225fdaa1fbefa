"""`Pending`: a value that may not be there yet, such as the tokens of a step under way; `Ready`: one that is there;
`OnThread`: one that a thread makes."""

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A value of work that was started. Where several come from one source, each is asked for in the order in which
    the work was started."""

    def ready(self) -> bool:
        """Whether `result` would return, or raise, without waiting."""

    def result(self) -> T_co:
        """The value, waited for; the same one at every call. Raises what went wrong with the work."""


class Ready(Generic[T_co]):
    """A `Pending` whose value is there. No Future: that makes locks, at every step."""

    def __init__(self, value: T_co) -> None:
        self._value = value

    def ready(self) -> bool:
        """True: the value is there."""
        return True

    def result(self) -> T_co:
        """The value, which was there from the beginning."""
        return self._value


class OnThread(Generic[T]):
    """A `Pending` whose value is that of work on another thread."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()

    def result(self) -> T:
        """The value, waited for. Raises what the work raised."""
        return self._future.result()
