"""Plane 2, the engine core: decides what runs in each step. Torch-free; knows token ids and blocks, no text."""
