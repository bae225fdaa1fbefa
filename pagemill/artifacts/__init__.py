"""What a model is on disk: aliases, downloads, Hugging Face configs, GGUF headers. Never reads a weight."""
