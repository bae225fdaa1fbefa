"""Attention over the paged KV cache: interface, selection, the layer, and the backends."""
