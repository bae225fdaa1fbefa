"""Step extensions: what an engine's half tells the workers' halves with a step, and what these answer.

A step carries payloads by name and knows nothing about them; so does the call that samples it. The codec finds the type
of a payload by its name; within a process a payload is passed on as it is.
"""

from typing import Any

import msgspec


class StepExtension(msgspec.Struct, frozen=True, kw_only=True):
    """What a line of catalog/step_extensions.py names: both halves of an extension and what they exchange. Neither
    half is imported by the process of the other."""

    engine: str
    """"module:Class" of an `EngineExtension` (engine/extensions/interface.py)."""
    worker: str
    """"module:Class" of a `WorkerExtension` (worker/extensions/interface.py)."""
    payload: type
    """What goes to the workers: a frozen Struct or dataclass of what the codec knows (transport/codec.py)."""
    sampling_payload: type | None = None
    """The same of what goes to them later, with the call that samples a step; None: nothing does."""
    answer: type | None = None
    """The same of what comes back with the tokens of a step; None: nothing does."""


class StepPayloads(dict[str, Any]):
    """Name of an extension -> its payload, in the order of the catalogue. Never empty where a step has one."""


class SamplingPayloads(dict[str, Any]):
    """Name of an extension -> what it says with the call that samples a step. Never empty where such a call has one."""


class StepAnswers(dict[str, Any]):
    """Name of an extension -> its answer to one step. Never empty where an output has one."""
