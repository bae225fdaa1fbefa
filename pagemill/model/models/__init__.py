"""Architectures: one file each, listed in catalog/models.py; what they share is in causal_lm.py and decoder.py."""
