"""Piecewise torch.compile: the model is traced once, cut at attention, and each piece compiled for any number of
tokens."""
