"""Decode steps on a CPU as one native call each: what can run so, and the call."""
