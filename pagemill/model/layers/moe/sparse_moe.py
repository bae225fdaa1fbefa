"""`SparseMoE`: the experts of a layer: router, experts, and the sum over ranks."""

from torch import Tensor, nn

from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.router import Router


class SparseMoE(nn.Module):
    """[T, E] -> [T, E]: the weighted sum of each token's experts."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        routing: Routing,
        activation: str,
        *,
        ctx: LayerContext,
        corrected: bool = False,
    ) -> None:
        """`sizes`: of a token, of an expert's inside, and how many experts the model has. `corrected`: see Router.
        Raises ConfigError when the experts cannot be split over the ranks."""
        super().__init__()
        size, inner_size, num_experts = sizes
        self.gate = Router(size, num_experts, routing, ctx=ctx.child("gate"), corrected=corrected)
        self.experts = Experts(size, inner_size, num_experts, activation, ctx=ctx.child("experts"))
        self._exchange = ctx.exchange

    @property
    def exchanges(self) -> bool:
        """Whether tokens are exchanged with other replicas, all of a step's at once."""
        return self._exchange is not None

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, E] -> [T, E], on every rank that computes these tokens."""
        chosen, weights = self.gate.choose(hidden)
        if self._exchange is not None:
            return self._exchange.add_up(self.experts(*self._exchange.gather(hidden, chosen, weights)))
        share: Tensor = self.experts(hidden, chosen, weights)
        return self.experts.group.all_reduce(share)
