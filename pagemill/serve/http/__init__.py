"""The OpenAI-compatible HTTP API. Knows requests and responses; text is made by `AsyncLLM`."""
