"""Text to token ids and back, and chat templates. Knows nothing about requests."""
