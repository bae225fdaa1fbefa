"""The rules that complete the settings: one module per section, called by `resolve` in the order of their needs."""
