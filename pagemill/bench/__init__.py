"""Measurements: offline throughput and latency, load on a server, and the scheduler alone.

Knows nothing about the command line.
"""
