"""`RecurrentLayer`: a layer whose output depends on a few inputs before it and on a state: it finds both, cuts a step
into what each request has of it, and keeps what comes next. What is computed, a subclass says."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pagemill.model.attention.state_layer import Run, StateLayer, Trials
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.recurrences import convolve, convolve_one
from pagemill.model.loading.part import Part
from pagemill.model.loading.stored import LayerTensor, StoredTensor


class Convolution(nn.Module):
    """The weights of a short causal convolution of each channel that this rank holds."""

    def __init__(
        self, channels: int, size: int, held: Tensor, *, bias: bool, ctx: LayerContext, factors: Tensor | None = None
    ) -> None:
        """`channels`: of the model. `held`: the numbers of those that are held here, in their order. `factors`: one
        for each of these, by which its inputs are multiplied first: the weight takes them in."""
        super().__init__()
        self.channels = len(held)
        self.size = size
        self._held = held
        self._takes_all = torch.equal(held, torch.arange(channels, device=held.device))
        self._factors = factors
        self._shapes: dict[str, tuple[int, ...]] = {"weight": (channels, 1, size)}
        if bias:
            self._shapes["bias"] = (channels,)
        self._dtype = ctx.dtype
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """Every tensor of a checkpoint that belongs to the layer: all of it, on every rank."""
        return tuple(LayerTensor.whole(kind, shape) for kind, shape in self._shapes.items())

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take a checkpoint tensor; the weight becomes [channels, size]."""
        if not self._takes_all:
            tensor = tensor[self._held.to(tensor.device)]
        if kind == "weight":
            tensor = tensor.squeeze(1)
            if self._factors is not None:
                tensor = tensor.float() * self._factors.to(tensor.device).unsqueeze(1)
        setattr(self, kind, tensor.to(self._dtype))


class RecurrentLayer(StateLayer):
    """Keeps the inputs of its convolution, [size - 1, channels], in the model's type, and a state in float32.

    Letters in shapes: T tokens, R requests, C channels of the convolution.
    """

    def __init__(
        self,
        convolution: Convolution,
        state: tuple[int, ...],
        *,
        vectors: Mapping[str, tuple[int, ...]],
        rows: range,
        ctx: LayerContext,
    ) -> None:
        """`vectors`: parameters of the layer's own, kind -> shape; kept in float32, those `rows` of them that this rank
        holds."""
        kept = (convolution.size - 1, convolution.channels)
        super().__init__([kept, state], [str(ctx.dtype)[6:], "float32"], name=ctx.name)
        self.conv1d = convolution
        self._vectors = dict(vectors)
        self._rows = rows
        self._tried: tuple[Trials, list[tuple[Tensor, Tensor]]] | None = None
        """Of the last step, what may be kept after each place of its trials."""

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """The vectors; what has weights of its own declares them itself."""
        part = Part(0, self._rows.start, self._rows.stop)
        return tuple(LayerTensor(StoredTensor(kind, shape), 0, part) for kind, shape in self._vectors.items())

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take this rank's part of a checkpoint tensor."""
        setattr(self, kind, tensor.float())

    def scan(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of one request: x [T, C] from the convolution, what is `beside` it [T, n], and the state -> [T, m] and
        the state after the last token."""
        raise TypeError(f"{type(self).__name__} does not say how tokens are computed")

    def step(self, x: Tensor, beside: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one token of each request: x [R, C], beside [R, n], state [R, ...]."""
        raise TypeError(f"{type(self).__name__} does not say how a token is computed")

    def advance(self, x: Tensor, beside: Tensor) -> Tensor:
        """x [T, C], the convolution's input, and what is `beside` it, [T, n], of all requests -> [T, m]. All states are
        read before one is written."""
        plan = self.metadata()
        fresh = plan.fresh.view(-1, *[1] * 2)
        inputs, states = self.states
        before = inputs.index_select(0, plan.source).masked_fill_(fresh, 0)
        begin = states.index_select(0, plan.source)
        begin.masked_fill_(plan.fresh.view(-1, *[1] * (begin.dim() - 1)), 0)
        singles = plan.singles
        if not plan.runs and len(singles.segments) == len(x):
            out, kept, ends = self._one_each(x, beside, before, begin)
            inputs[plan.target] = kept.to(inputs.dtype)
            states[plan.target] = ends
            return out
        parts: list[tuple[Tensor, Tensor]] = []
        if len(singles.segments):
            rows = singles.rows
            out, kept, ends = self._one_each(x[rows], beside[rows], before[singles.segments], begin[singles.segments])
            target = plan.target[singles.segments]
            inputs[target] = kept.to(inputs.dtype)
            states[target] = ends
            parts.append((rows, out))
        result: Tensor | None = None
        for run in plan.runs:
            out = self._run(run, x[run.begin : run.end], beside[run.begin : run.end], before, begin, plan.target)
            if result is None:
                result = x.new_zeros(len(x), out.shape[1])
            result[run.begin : run.end] = out
        if result is None:
            result = x.new_zeros(len(x), parts[0][1].shape[1] if parts else 0)
        for rows, out in parts:
            result[rows] = out.to(result.dtype)
        if plan.trials is not None:
            result = self._try(plan.trials, x, beside, result if len(plan.source) else None)
        return result

    def keep(self, num_kept: Tensor) -> None:
        if self._tried is None:
            return
        trials, found = self._tried
        self._tried = None
        counts = num_kept[trials.requests].to(trials.rows.device)
        for place, (kept, ends) in enumerate(found):
            count = counts[: len(ends)]
            stays = (count == place + 1) | ((count > place) & trials.last[: len(ends), place])
            which = stays.nonzero().squeeze(1)
            target = trials.target[which, place]
            inputs, states = self.states
            inputs[target] = kept[which]
            states[target] = ends[which]

    def _try(self, trials: Trials, x: Tensor, beside: Tensor, result: Tensor | None) -> Tensor:
        """Token by token, as they would be computed without drafts; `result`: what other rows gave, if any did."""
        inputs, states = self.states
        fresh = trials.fresh
        before = inputs.index_select(0, trials.source).masked_fill_(fresh.view(-1, 1, 1), 0)
        begin = states.index_select(0, trials.source)
        begin.masked_fill_(fresh.view(-1, *[1] * (begin.dim() - 1)), 0)
        found = []
        for place, alive in enumerate(trials.num_alive):
            rows = trials.rows[:alive] + place
            out, kept, begin = self._one_each(x[rows], beside[rows], before[:alive], begin[:alive])
            before = kept.to(inputs.dtype)
            found.append((before, begin))
            if result is None:
                result = x.new_zeros(len(x), out.shape[1])
            result[rows] = out.to(result.dtype)
        self._tried = trials, found
        if result is None:
            raise RuntimeError("nobody tries a draft")
        return result

    def _one_each(self, x: Tensor, beside: Tensor, before: Tensor, begin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        conv = self.conv1d
        mixed = nn.functional.silu(convolve_one(x, before, conv.weight, conv.bias))
        out, ends = self.step(mixed, beside, begin)
        return out, torch.cat([before[:, 1:].to(x.dtype), x.unsqueeze(1)], dim=1), ends

    def _run(self, run: Run, x: Tensor, beside: Tensor, before: Tensor, begin: Tensor, target: Tensor) -> Tensor:
        """One request: the segments of a run follow each other."""
        inputs, states = self.states
        conv = self.conv1d
        old = before[run.segment]
        mixed = nn.functional.silu(convolve(x, old, conv.weight, conv.bias))
        joined = torch.cat([old.to(x.dtype), x])
        state = begin[run.segment]
        outputs = []
        start = 0
        for offset, end in enumerate(run.ends):
            out, state = self.scan(mixed[start:end], beside[start:end], state)
            outputs.append(out)
            block = target[run.segment + offset]
            inputs[block] = joined[end : end + conv.size - 1].to(inputs.dtype)
            states[block] = state
            start = end
        return torch.cat(outputs)
