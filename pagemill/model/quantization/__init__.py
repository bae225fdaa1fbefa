"""How a linear layer's weight is held and multiplied: one method per file."""
