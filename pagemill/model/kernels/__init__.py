"""Kernels: C++ for CPUs behind a plain C interface, each with a torch reference. Stateless; tensors in, tensors out."""
