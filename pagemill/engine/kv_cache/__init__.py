"""Who owns which KV block. Decides only; the memory itself is in `worker/kv_tensors`."""
