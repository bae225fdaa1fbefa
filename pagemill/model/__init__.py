"""Plane 4, the network: tensors in, tensors out. Knows no requests and no scheduling."""
