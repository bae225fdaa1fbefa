"""Marks of single cases of a parametrized test."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that `make check` leaves out: another one of the same test stays in it."""
