"""A disk that is full is found behind whatever it made fail."""

import errno

import pytest

from pagemill.utils.disk_errors import disk_problem


class WrappedError(Exception):
    def __init__(self, inner: BaseException) -> None:
        super().__init__("the compiler failed")
        self.inner_exception = inner


def caused() -> BaseException:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system")
        except OSError as error:
            raise ValueError("x") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (WrappedError(PermissionError(errno.EACCES, "Permission denied")), "Permission denied"),
        (
            RuntimeError("g++: fatal error: cannot write x.s: No space left on device"),
            "No space left on device",
        ),
        (caused(), "Read-only file system"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (ValueError("x"), None),
    ],
)
def test_the_problem_is_found(error: BaseException, problem: str | None) -> None:
    assert disk_problem(error) == problem


def test_errors_that_refer_to_each_other() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert disk_problem(first) is None
