"""`SparseMoE`: the MLP of a layer with experts: router, experts, the sum over ranks, and what all tokens share."""

from torch import Tensor, nn

from pagemill.model.kernels.ops import computed
from pagemill.model.kernels.product import Product
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.router import Router
from pagemill.model.layers.norm import RMSNorm


class SparseMoE(nn.Module):
    """[T, E] -> [T, E]: the weighted sum of each token's experts, plus `shared_experts` of it, where there are such."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        routing: Routing,
        activation: str,
        *,
        ctx: LayerContext,
        shared: nn.Module | None = None,
        corrected: bool = False,
    ) -> None:
        """`sizes`: of a token, of an expert's inside, and how many experts the model has. `corrected`: see Router.
        Raises ConfigError when the experts cannot be split over the ranks."""
        super().__init__()
        size, inner_size, num_experts = sizes
        self.gate = Router(size, num_experts, routing, ctx=ctx.child("gate"), corrected=corrected)
        self.experts = Experts(size, inner_size, num_experts, activation, ctx=ctx.child("experts"))
        self.shared_experts = shared
        self._exchange = ctx.exchange

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, E] -> [T, E], on every rank that computes these tokens."""
        chosen, weights = self.gate.choose(hidden)
        mixed = self._mix(hidden, chosen, weights)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)

    def after_norm(self, norm: RMSNorm, hidden: Tensor | Product, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(forward(norm(hidden + residual)), hidden + residual)."""
        if residual is None:
            hidden = computed(hidden)
            return self(norm(hidden)), hidden
        normed, residual = norm.add_forward(hidden, residual)
        return self(normed), residual

    def _mix(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self._exchange is not None:
            return self._exchange.add_up(self.experts(*self._exchange.gather(hidden, chosen, weights)))
        share: Tensor = self.experts(hidden, chosen, weights)
        return self.experts.group.all_reduce(share)
