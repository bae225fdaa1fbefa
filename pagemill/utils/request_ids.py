"""Ids for requests whose caller has none."""

import uuid


def random_uuid() -> str:
    """32 hexadecimal digits that nobody else drew."""
    return uuid.uuid4().hex
