"""Prompts to engine requests, engine outputs to text. Knows no HTTP and no engine."""
