"""Formats of messages, as data: one constant for each, listed in `catalog/parsers.py` under their names."""
