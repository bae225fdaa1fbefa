"""Weight formats: one file each with `iterate(facts, dtype, seed, select)`, listed in catalog/weights.py."""
