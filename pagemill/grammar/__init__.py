"""Structured output: what a request asks its output to look like, made into a grammar over the tokens of a model."""
