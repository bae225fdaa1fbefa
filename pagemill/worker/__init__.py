"""Plane 3, device processes: execute one step. Knows slots, batches and tensors; decides nothing."""
