"""Modes of graphs."""

import pytest

from pagemill.config.graph_mode import GraphMode


@pytest.mark.parametrize(
    "mode, decode, mixed",
    (
        ("NONE", "NONE", "NONE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL", "FULL", "FULL"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
    ),
)
def test_what_batches_run_in(mode, decode, mixed):
    assert (GraphMode[mode].decode.value, GraphMode[mode].mixed.value) == (decode, mixed)
    assert GraphMode[mode].uses_full == (decode == "FULL")
    assert GraphMode[mode].uses_pieces == (mixed == "PIECEWISE")


def test_names():
    assert set(GraphMode) == {"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}
