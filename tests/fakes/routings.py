"""Every way in which a router chooses experts, for the kernels of each device."""

from pagemill.model.kernels.routing import Routing

ROUTINGS = [
    Routing(2),
    Routing(3, renormalize=True, scale=2.5),
    Routing(1, sigmoid=True),
    Routing(3, num_groups=4, top_groups=2),
    Routing(4, sigmoid=True, renormalize=True, num_groups=4, top_groups=3, group_by_two=True, scale=2.5),
]
