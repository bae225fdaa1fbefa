"""The scheduler measured without a model, alone or beside the reference engine's. Knows nothing about flags."""
