"""Mixtures of experts: a router, the experts that a rank holds, and how ranks share the work."""
