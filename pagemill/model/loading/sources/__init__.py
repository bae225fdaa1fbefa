"""Weight formats: one file each with `iterate(path, facts, dtype)`, listed in catalog/weights.py."""
