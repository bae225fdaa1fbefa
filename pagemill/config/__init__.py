"""Frozen sections, arguments derived from their fields, and `resolve()`. No torch, no `__post_init__` magic."""
