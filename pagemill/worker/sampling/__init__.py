"""Logits to tokens: processors in order, filters, and noise that depends on seed and position alone."""
