"""`PiecewiseBackend`: what torch.compile calls with the traced model - cut, compile the pieces, put them together.

Knows fx graphs and how a piece is compiled; nothing about models or CUDA graphs but the wrapper of a piece.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from pagemill.config.graph_config import ATTENTION_OP
from pagemill.config.graph_mode import GraphMode
from pagemill.log import get_logger
from pagemill.model.attention.op import Attends
from pagemill.model.forward_context import current_forward
from pagemill.worker.graphs.compile.dump import GraphDump
from pagemill.worker.graphs.compile.split import Piece, SplitGraph, op_name, split
from pagemill.worker.graphs.pieces import GapBuffers

logger = get_logger(__name__)

_NUM_ATTENTION_ARGS = 4
"""query, key, value, name."""

WrapPiece = Callable[[Callable[..., Any]], Callable[..., Any]]
Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_eager(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph, operation by operation."""
    return graph


def compile_inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Fused kernels for any number of tokens, from the cache where they have been compiled before."""
    from torch._inductor import standalone_compile  # deferred: heavy, and only this way of compiling needs it

    compiled: Callable[..., Any] = standalone_compile(graph, list(inputs), dynamic_shapes="from_tracing_context")
    return compiled


COMPILERS: Mapping[str, Compile] = {"eager": compile_eager, "inductor": compile_inductor}


@dataclass(frozen=True)
class PieceTools:
    """What is done with a piece in addition to compiling it."""

    wrap: WrapPiece
    """Makes a compiled piece one that is captured and replayed."""
    gaps: GapBuffers
    """Where results of splitting operations lie for the piece after them."""
    dump: GraphDump
    layers: Mapping[str, Attends]
    """Layer name -> attention layer."""


class PiecewiseBackend:
    """A backend for torch.compile. Used once: the model is traced once, for any number of tokens."""

    def __init__(self, compiler: str, splitting_ops: Sequence[str], tools: PieceTools) -> None:
        """`compiler`: a name in COMPILERS."""
        self.num_compiled = 0
        """Pieces that were compiled: one more than there are cuts."""
        self.num_cuts = 0
        self.seconds = 0.0
        self._compiler = COMPILERS[compiler]
        self._splitting_ops = frozenset(splitting_ops)
        self._tools = tools

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The whole model as a callable of the same inputs. Raises what the compiler raises, with the piece's name."""
        began = time.monotonic()
        self._tools.dump.write("model", graph)
        parts = split(graph, self._splitting_ops)
        self._tools.dump.write("split", parts.module)
        for piece in parts.pieces:
            self._tools.dump.write(piece.name + ("_cut" if piece.cut else ""), piece.graph)
            self._finish(parts, piece)
        self.seconds = time.monotonic() - began
        logger.info("compiled %d pieces in %.1f s", self.num_compiled, self.seconds)
        return parts.module

    def _finish(self, parts: SplitGraph, piece: Piece) -> None:
        if piece.cut:
            self.num_cuts += 1
            call = attention_call(piece.graph, self._tools.layers) or piece.graph
            parts.replace(piece, _Cut(call, self._tools.gaps))
            return
        inputs = [node.meta.get("example_value") for node in piece.graph.graph.nodes if node.op == "placeholder"]
        try:
            compiled = self._compiler(piece.graph, inputs)
        except Exception as error:
            error.add_note(f"while compiling {piece.name}; compilation_config.debug_dump_path shows the graphs")
            raise
        self.num_compiled += 1
        parts.replace(piece, _Compiled(self._tools.wrap(compiled)))


class _Compiled(nn.Module):
    """A callable where fx wants a module."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self._compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self._compiled(*args)


class _Cut(nn.Module):
    """A splitting operation: never captured with the pieces, so its result is put where the next piece looks."""

    def __init__(self, call: Callable[..., Any], gaps: GapBuffers) -> None:
        super().__init__()
        self._call = call
        self._gaps = gaps

    def forward(self, *args: Any) -> Any:
        result = self._call(*args)
        if current_forward().graph_mode is not GraphMode.PIECEWISE or not isinstance(result, Tensor):
            return result
        return self._gaps.hold(result)


def attention_call(graph: GraphModule, layers: Mapping[str, Attends]) -> Callable[..., Tensor] | None:
    """What the graph does, without the detour through the operation's dispatch; None when it is another operation."""
    call = next(node for node in graph.graph.nodes if node.op == "call_function")
    if op_name(call) != ATTENTION_OP or len(call.args) != _NUM_ATTENTION_ARGS:
        return None
    places = {node: index for index, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    query, key, value = (places.get(arg) for arg in call.args[:3])
    attend = layers[call.args[3]].attend
    if query is None:
        return None
    if key is None or value is None:
        return lambda *args: attend(args[query], None, None)
    return lambda *args: attend(args[query], args[key], args[value])


def no_guards(guards: Sequence[Any]) -> list[bool]:
    """For torch.compile: the one compiled form is right for every call, so nothing is checked."""
    return [False] * len(guards)
