"""The scheduler measured without a model, alone or together with the reference engine's. Knows nothing about flags."""
