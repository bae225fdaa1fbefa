"""`make_graphs`: from settings, a model and a device's graphs to the `Graphs` of a runner. Chooses; does no work."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pagemill import envs
from pagemill.config.compilation import PIECEWISE_COMPILER
from pagemill.config.graph_config import CompilationConfig, GraphConfig
from pagemill.config.graph_mode import GraphMode
from pagemill.errors import ConfigError
from pagemill.log import get_logger
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.attention.layer import Attention
from pagemill.platforms.interface import GraphMaker
from pagemill.worker.graphs.dispatcher import SMALL_STEP, BatchLimits, Dispatcher
from pagemill.worker.graphs.downgrade import downgrade
from pagemill.worker.graphs.graph_runner import CompileModel, GraphRunner, Graphs, NoGraphs, WrapPiece
from pagemill.worker.graphs.pieces import GapBuffers

logger = get_logger(__name__)


def make_graphs(
    config: GraphConfig,
    layers: Mapping[str, CacheLayer],
    limits: BatchLimits,
    maker: GraphMaker | None,
    *,
    rank: int = 0,
) -> Graphs:
    """`layers`: of the model, by name. `maker`: None where the device has no
    graphs. Raises ConfigError for a model that cannot be compiled."""
    compilation = config.compilation_config
    compile_model = _compiler(compilation, layers, rank) if compilation.mode == PIECEWISE_COMPILER else None
    wanted = compilation.cudagraph_mode
    if maker is None or wanted is GraphMode.NONE:
        return NoGraphs(compile_model)
    supports = graph_supports(layers)
    mode, why = downgrade(
        wanted,
        supports,
        pieces=compilation.is_cut and not uncut(layers),
        uniform_query_len=limits.uniform_query_len,
    )
    if why:
        logger.warning("cudagraph_mode %s becomes %s: %s", wanted.value, mode.value, why)
    if mode is GraphMode.NONE:
        return NoGraphs(compile_model)
    always = min(supports.values(), default=AttentionCGSupport.ALWAYS) is AttentionCGSupport.ALWAYS
    if not always:  # a step that verifies drafts is as mixed as any, of requests of few tokens
        limits = replace(limits, verify_lens=())
    sizes = compilation.cudagraph_capture_sizes
    return GraphRunner(
        Dispatcher(mode, sizes, limits, small_step=small_step(layers) if always else 0),
        maker,
        num_warm_ups=compilation.cudagraph_num_of_warmups,
        lazy=compilation.cudagraph_lazy_capture,
        check_addresses=envs.log_level() == "DEBUG",
        compile_model=compile_model,
        reports=config.cudagraph_metrics,
    )


def graph_supports(layers: Mapping[str, CacheLayer]) -> dict[str, AttentionCGSupport]:
    """Name of a backend, or kind of layer -> for which batches it can be captured."""
    return {
        layer.backend.name if isinstance(layer, Attention) else type(layer).__name__: _support(layer)
        for layer in layers.values()
    }


def small_step(layers: Mapping[str, CacheLayer]) -> int:
    """Tokens up to which steps that do more than decode are better replayed whole."""
    builders = [layer.backend.metadata_builder for layer in layers.values() if isinstance(layer, Attention)]
    return min([SMALL_STEP, *(most for builder in builders if (most := builder.most_replayed) is not None)])


def uncut(layers: Mapping[str, CacheLayer]) -> list[str]:
    """Layers that read the step's metadata, but at which a model is not cut."""
    return [name for name, layer in layers.items() if not isinstance(layer, Attention)]


def _support(layer: CacheLayer) -> AttentionCGSupport:
    if isinstance(layer, Attention):
        return layer.backend.metadata_builder.graph_support
    return getattr(layer, "graph_support", AttentionCGSupport.NEVER)


def _compiler(config: CompilationConfig, layers: Mapping[str, CacheLayer], rank: int) -> CompileModel:
    others = uncut(layers)
    if others:
        raise ConfigError(
            f"compilation_config: mode={config.mode} cannot compile layers such as {others[0]}, which are no attention "
            "layers; use mode 0"
        )
    from pagemill.worker.graphs.compile.compiled_model import CompiledModel  # deferred: few models are compiled

    attention = {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}

    def compile_model(model: Callable[..., Any], wrap_piece: WrapPiece, gaps: GapBuffers) -> CompiledModel:
        return CompiledModel(model, attention, config, wrap_piece, gaps, rank=rank)

    return compile_model
