"""Which tokens may come next, told to the workers in two parts: the step extension "grammar_masks"."""

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.messages.extensions import StepExtension


class FormsBegun(msgspec.Struct, frozen=True, array_like=True):
    """Told with a step in which a request begins whose output has a form."""

    slots: list[int]


class GrammarMasks(msgspec.Struct, frozen=True, array_like=True):
    """The masks of one step, told with the call that samples it. There are some, maybe none, wherever a slot samples
    whose output has a form."""

    slots: list[int]
    """[K] those that may not sample just anything. One that may verify drafts is there once more for each, in their
    order, with what may come after it."""
    masks: npt.NDArray[np.int32]
    """[K, ceil(V / 32)] a bit for each token that may come: token t is bit t % 32 of word t // 32."""


GRAMMAR_MASKS = StepExtension(
    engine="pagemill.engine.extensions.grammar_masks:MasksOfStep",
    worker="pagemill.worker.sampling.grammar_masks:MasksOfWorker",
    payload=FormsBegun,
    sampling_payload=GrammarMasks,
)
