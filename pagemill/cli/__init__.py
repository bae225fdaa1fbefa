"""The `pagemill` command: one module per subcommand. Composes the planes; computes nothing itself."""
