"""Building blocks of models. Each knows its sizes and nothing of the model around it."""
