"""How many examples hypothesis makes, for a test that names a number."""

from hypothesis import settings


def examples(count: int) -> int:
    """So many; as large a part of them as the profile of hypothesis in use has of the usual hundred."""
    return -(-count * settings().max_examples // 100)
