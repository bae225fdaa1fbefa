"""Clients of other makers against a real server, on an engine that says what it is told."""
