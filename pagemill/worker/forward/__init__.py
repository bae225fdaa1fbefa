"""How a batch becomes sampled tokens: on the host at once, or queued on a device ahead of the tokens it needs."""
