"""One manager per kind of KV group; the table of kinds is in `coordinator.py`."""
