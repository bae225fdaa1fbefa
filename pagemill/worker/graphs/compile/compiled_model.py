"""`CompiledModel`: a model whose forward pass is traced and compiled at its first step. Knows no batches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagemill import envs
from pagemill.config.compilation import PIECEWISE_COMPILER
from pagemill.config.graph_config import CompilationConfig
from pagemill.errors import ConfigError
from pagemill.model.attention.op import Attends, bound_layers
from pagemill.utils.disk_errors import disk_problem
from pagemill.worker.graphs.compile.backend import PieceTools, PiecewiseBackend, WrapPiece, no_guards
from pagemill.worker.graphs.compile.dump import GraphDump
from pagemill.worker.graphs.pieces import GapBuffers


class CompiledModel:
    """Mimics `model(inputs, positions)`. Code is compiled once, for any number of tokens, and kept in a folder from
    where the next start takes it.

    The first step of more than one token compiles; steps before it run as they are written, for one token would be
    taken for a constant.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        layers: Mapping[str, Attends],
        config: CompilationConfig,
        wrap_piece: WrapPiece,
        gaps: GapBuffers,
        *,
        rank: int = 0,
    ) -> None:
        """`layers`: the model's attention layers by name. `config`: complete. `rank`: of the worker, in the names of
        what is dumped."""
        dump_path = None if config.debug_dump_path is None else Path(config.debug_dump_path) / f"rank_{rank}"
        tools = PieceTools(wrap_piece, gaps, GraphDump(dump_path), layers)
        self.backend = PiecewiseBackend(config.backend, config.splitting_ops, tools)
        self._model = model
        self._layers = layers
        self._cache = envs.cache_home() / "torch_compile" if config.cache_dir is None else Path(config.cache_dir)
        self._compiled = torch.compile(
            getattr(model, "forward", model),
            backend=self.backend,
            fullgraph=True,
            # Only what `_prepare` marks is dynamic; otherwise numbers of the model would become inputs, too.
            dynamic=False,
            options={"guard_filter_fn": no_guards},
        )
        self._traced = False

    def __call__(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """As the model's forward. Raises ConfigError when the model cannot be compiled."""
        if not self._traced:
            return self._first(inputs, positions)
        return self._run(inputs, positions)

    def _run(self, inputs: Tensor, positions: Tensor) -> Tensor:
        with bound_layers(self._layers):
            result: Tensor = self._compiled(inputs, positions)
        return result

    def _first(self, inputs: Tensor, positions: Tensor) -> Tensor:
        if inputs.shape[0] < 2:
            result: Tensor = self._model(inputs, positions)
            return result
        self._prepare(inputs, positions)
        try:
            result = self._run(inputs, positions)
        except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
            problem = disk_problem(error)
            if problem is not None:
                raise self._not_kept(problem) from error
            if isinstance(error, OSError):
                raise
            why = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"compilation_config: mode={PIECEWISE_COMPILER} cannot compile this model here ({why}); use mode 0, or "
                "set debug_dump_path to see the graphs"
            ) from error
        self._traced = True
        return result

    def _prepare(self, inputs: Tensor, positions: Tensor) -> None:
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._not_kept(error.strerror or str(error)) from error
        envs.keep_compiled_code(self._cache)
        for tensor in (inputs, positions):
            torch._dynamo.mark_dynamic(tensor, 0)

    def _not_kept(self, problem: str) -> ConfigError:
        return ConfigError(
            f"compiled code cannot be kept in {self._cache}: {problem}; make room there, or set cache_dir of "
            "compilation_config (or PAGEMILL_CACHE_ROOT) to another folder"
        )
