"""`Routing`: how a router chooses experts. Data only; `reference.py` and the kernels compute it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """From [T, X] router logits to the top_k experts of each token and their weights.

    Scores are the softmax or the sigmoid of the logits. With groups (DeepSeek-V2 and V3, 2024), only experts of the
    best `top_groups` of `num_groups` equal groups of neighbours are chosen from. A group is as good as its best expert
    or, where `group_by_two`, as its best two together.
    """

    top_k: int
    sigmoid: bool = False
    renormalize: bool = False
    """Whether the weights of a token are made to add up to 1."""
    scale: float = 1.0
    """Factor on all weights."""
    num_groups: int = 1
    top_groups: int = 1
    group_by_two: bool = False
