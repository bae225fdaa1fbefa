"""From files to a loaded model: where tensors come from, where they go, and that none is missing."""
