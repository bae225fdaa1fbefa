"""What travels on the socket between an engine core and a front end, or the coordinator of several cores."""

import msgspec

from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest
from pagemill.messages.waves import WaveOrder, WaveReport

Plain = str | int | float | bool | None


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Queue requests."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget requests; unknown ids are ignored."""

    request_ids: list[str]


class CoreCall(msgspec.Struct, frozen=True, tag="call"):
    """Call a method of the core by name; a CallResult answers."""

    call_id: int
    method: str
    args: list[Plain] = []


class FrontEndGone(msgspec.Struct, frozen=True, tag="gone"):
    """A front end died: abort what it had asked for. Only the supervisor may say so. Inside a core, it is told of each
    connection of a front end that is lost."""

    index: int
    """Of the front end; inside a core, the number of its connection."""


EngineCall = AddRequests | AbortRequests | CoreCall | FrontEndGone | WaveOrder


class NamedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The first field of an EngineCoreRequest."""

    request_id: str


class NamedRequests(msgspec.Struct, frozen=True, tag="add"):
    """What can be read of an AddRequests that is wrong elsewhere."""

    requests: list[NamedRequest]


class NamedCall(msgspec.Struct, frozen=True, tag="call"):
    """What can be read of a CoreCall that is wrong elsewhere."""

    call_id: int


Names = NamedRequests | NamedCall


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """What a step produced for one front end."""

    outputs: EngineCoreOutputs


class CallResult(msgspec.Struct, frozen=True, tag="result"):
    """The answer to a CoreCall."""

    call_id: int
    value: Plain = None
    error: str | None = None
    """What the call raised, as text; then there is no value."""


EngineReport = StepOutputs | CallResult | WaveReport
