"""`Pooling`: what a model that pools does, and the parameters of requests completed by it. Knows no prompts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.errors import RequestError
from pagemill.messages.pooling_params import PoolingParams, PoolingTask, PoolingType


@dataclass(frozen=True, slots=True)
class Pooling:
    """What requests get unless they say otherwise."""

    params: PoolingParams
    """Complete, but for what is only said where it differs from all."""
    embedding_size: int
    """Numbers of a row: of a vector, or classes."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where the model tells them apart."""
    pairs: bool = False
    """Whether it scores two texts together."""
    max_text_tokens: int | None = None
    """Most tokens of a text that is split where it is longer than the context; None: none is."""

    @property
    def task(self) -> PoolingTask:
        """What the model does."""
        return PoolingTask(self.params.task or PoolingTask.EMBED)

    @property
    def compares(self) -> bool:
        """Whether two texts can be scored: together, or by their vectors."""
        return self.pairs or self.task.embeds

    @property
    def one_vector(self) -> bool:
        """Whether a text becomes one vector, unless its request says otherwise."""
        return self.task.embeds and not self.task.per_token and not self.params.per_token

    def check_compares(self) -> None:
        """Raises RequestError for a model by which two texts cannot be scored."""
        if not self.compares:
            raise RequestError(
                f"this model scores no pairs: it tells {self.embedding_size} classes apart (task {self.task}), and one "
                "class, or vectors to compare, are needed"
            )

    def completed(self, params: PoolingParams) -> PoolingParams:
        """With nothing left open that has a default. Raises RequestError, which names the field, for what this model
        does not do."""
        task = self._task(params.task)
        default = self.params
        own_type = default.pooling_type
        if task.per_token and not PoolingType(own_type or PoolingType.LAST).per_token:
            own_type = PoolingType.ALL
        normalize = params.use_activation if params.normalize is None else params.normalize
        self._check(params, task, normalize)
        chosen = params.returned_token_ids
        return params.replace(
            task=task,
            pooling_type=params.pooling_type or own_type,
            dimensions=default.dimensions if params.dimensions is None else params.dimensions,
            normalize=task.embeds and bool(default.normalize if normalize is None else normalize),
            use_activation=not task.embeds
            and bool(default.use_activation if params.use_activation is None else params.use_activation),
            step_tag_id=default.step_tag_id if params.step_tag_id is None else params.step_tag_id,
            returned_token_ids=default.returned_token_ids if chosen is None else tuple(chosen),
        )

    def _task(self, asked: str | None) -> PoolingTask:
        own = self.task
        if asked is None:
            return own
        task = PoolingTask(asked)
        fits = task.embeds == own.embeds and (task.per_token or not own.per_token)
        if task is PoolingTask.SCORE:
            fits = self.pairs
        if task is PoolingTask.REWARD:
            fits = own is PoolingTask.REWARD
        if not fits:
            raise RequestError(f"task={task.value!r} is not what this model does, which is {own.value}", "task")
        return task

    def _check(self, params: PoolingParams, task: PoolingTask, normalize: bool | None) -> None:
        if not task.embeds:
            if params.dimensions is not None:
                raise RequestError("dimensions is about vectors, and this model tells classes apart", "dimensions")
            if params.normalize:
                raise RequestError("normalize is about vectors, and this model tells classes apart", "normalize")
        if params.pooling_type == PoolingType.STEP and (params.step_tag_id, self.params.step_tag_id) == (None, None):
            raise RequestError("pooling_type STEP needs step_tag_id, the token that ends a step", "step_tag_id")
        for item in params.returned_token_ids or ():
            if item >= self.embedding_size:
                raise RequestError(
                    f"returned_token_ids holds {item}; there are 0 to {self.embedding_size - 1}", "returned_token_ids"
                )


def likeness(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    """Of two texts, by vectors of length 1: their cosine; of vectors of tokens, [n, D] and [m, D], the sum of the
    largest cosine of each of the first (late interaction; Khattab and Zaharia, "ColBERT", 2020)."""
    if first.ndim == 1:
        return float(first @ second)
    return float((first @ second.T).max(axis=1).sum())
