"""Logits processors: one file each, in the order of catalog/logits.py."""
