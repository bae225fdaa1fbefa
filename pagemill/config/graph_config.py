"""Compilation and CUDA graphs: `GraphSettings` and `CompilationSettings`, as users ask for them, and `GraphConfig` and
`CompilationConfig`, as they run."""

from dataclasses import dataclass, field

from pagemill.config.fields import setting
from pagemill.config.graph_mode import GraphMode

ATTENTION_OP = "pagemill::attention"
"""The operation that stands for every attention layer in compiled code."""


@dataclass(frozen=True)
class PassConfig:
    """What the compiler may do that needs to see more than a piece of the model."""

    fuse_attn: bool = setting(
        False, "hand the compiler the model in one piece, attention included: the same as no splitting_ops"
    )


@dataclass(frozen=True)
class CompilationSettings:
    """How the model is compiled and captured. What is not set here follows from the optimization level."""

    mode: int | None = setting(
        None, "0: layers run as they are written; 3: torch.compile, cut at splitting_ops (default: by level)", low=0
    )
    backend: str = setting("inductor", "what compiles a piece", choices=("inductor", "eager"))
    cudagraph_mode: GraphMode | None = setting(
        None,
        "which steps are replayed from CUDA graphs, and how much of them (default: by level)",
        choices=tuple(GraphMode),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, "numbers of tokens for which there are graphs; smaller batches are padded (default: 1, 2, 4, 8, 16, ...)"
    )
    max_cudagraph_capture_size: int | None = setting(
        None,
        "largest number of tokens for which there is a graph (default: twice max_num_seqs, at most 512, but at least "
        "max_num_seqs)",
        low=1,
    )
    cudagraph_num_of_warmups: int = setting(
        0, "steps of a shape that run before it is captured (0: one, of the first of each kind)", low=0
    )
    cudagraph_lazy_capture: bool = setting(
        True, "capture the usual sizes before the first request and others while idle; otherwise all before"
    )
    splitting_ops: tuple[str, ...] | None = setting(
        None, f"operations at which the model is cut; an empty list: nowhere (default: {ATTENTION_OP})"
    )
    pass_config: PassConfig = setting(PassConfig(), "JSON object: what the compiler may do across pieces")
    cache_dir: str | None = setting(None, "folder for compiled code (default: in the cache of pagemill)")
    debug_dump_path: str | None = setting(None, "folder for the graphs of the compiler, as text (default: nowhere)")


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(CompilationSettings):
    """Compilation and graphs as they run: `CompilationSettings` with every field decided."""

    mode: int = field()
    cudagraph_mode: GraphMode = field()
    cudagraph_capture_sizes: tuple[int, ...] = field()
    max_cudagraph_capture_size: int = field()
    splitting_ops: tuple[str, ...] = field()

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut at attention, so that pieces of it can be captured."""
        return self.splitting_ops != ()


@dataclass(frozen=True)
class GraphSettings:
    """Compilation and CUDA graphs. Explicit settings come before the optimization level."""

    optimization_level: int = setting(
        2,
        "0: eager; 1: CUDA graphs between attention layers; 2: and whole decode steps; 3: and torch.compile",
        low=0,
        short="-O",
    )
    enforce_eager: bool = setting(False, "no compilation and no CUDA graphs, whatever the level")
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, "numbers of tokens for which there are graphs; the same as in compilation_config"
    )
    max_cudagraph_capture_size: int | None = setting(
        None, "largest number of tokens for which there is a graph; the same as in compilation_config", low=1
    )
    cudagraph_metrics: bool = setting(False, "log now and then how many steps ran in which mode, and the padding")
    compilation_config: CompilationSettings = setting(
        CompilationSettings(), "JSON object, or one field at a time as -cc.FIELD VALUE", short="-cc"
    )


GRAPHS = GraphSettings()
"""Nothing asked for."""


@dataclass(frozen=True, kw_only=True)
class GraphConfig(GraphSettings):
    """`GraphSettings`, resolved: what runs is in `compilation_config`."""

    compilation_config: CompilationConfig = field()
