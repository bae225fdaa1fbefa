"""One endpoint family per module: its paths, what is done for them, and whether they need a key."""
