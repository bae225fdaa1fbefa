"""Hidden states to one vector per prompt. Knows no scheduler and no KV cache."""
