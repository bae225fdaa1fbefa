"""The KV cache as tensors: allocated to plan, viewed as each backend likes, bound to the layers."""
