"""Plane 1, the front end: text in, text out. Knows requests, tokenizers and HTTP; knows no tensors and no blocks."""
