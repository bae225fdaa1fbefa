"""Frozen data that crosses a plane. No torch, no behaviour beyond validating its own fields."""
