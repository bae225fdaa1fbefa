"""Uploads to a GPU; those that need one are in tests/gpu/test_loading.py."""

from pagemill.model.loading.upload import pieces


def test_pieces():
    assert list(pieces(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(pieces(4, 4)) == [slice(0, 4)]
    assert not list(pieces(0, 3))
