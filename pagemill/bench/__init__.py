"""Measurements: offline throughput and latency, and load on a server. Knows nothing about the command line."""
