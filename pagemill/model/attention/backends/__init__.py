"""Attention backends: one file each, listed in catalog/attention.py."""
