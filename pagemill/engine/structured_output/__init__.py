"""Structured output in the engine: grammars are made off the thread that schedules, and followed on it."""
