"""Triton kernels for GPUs: one topic per file. Importing a file here needs the package triton."""
