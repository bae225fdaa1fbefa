"""`EngineCalls`: what an engine can be told and asked besides requests. The part of `AsyncLLM` that its users call
rarely."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from pagemill.catalog.registry import load_path
from pagemill.errors import EngineDeadError, RequestError
from pagemill.messages.worker_api import CALLED_BY_NAME
from pagemill.serve.client.interface import EngineClient
from pagemill.serve.other_arguments import refused_method
from pagemill.tokenizers.interface import Tokenizer

if TYPE_CHECKING:
    from pagemill.config.arguments import EngineArgs

LAUNCH = "pagemill.launch:build_inproc"
"""Makes an engine. Named, as entries of the catalogue are, because it puts this together with everything else."""


class EngineCalls:
    """For `AsyncLLM` to inherit."""

    tokenizer: Tokenizer
    _client: EngineClient

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> Self:
        """An engine in this process, whose steps run on the event loop that uses it. Raises ConfigError or ModelError
        when the model cannot be loaded. For an engine in a process of its own, and many clients: `pagemill serve`."""
        launched = load_path("engine", LAUNCH)(engine_args)
        llm: Self = launched.llm
        return llm

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[str | int | float | bool | None] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker, by name (see `messages.worker_api.CALLED_BY_NAME`); the results by rank. It
        waits for the steps in flight. Raises RequestError for anything but such a name, with arguments that are plain
        and positional."""
        if not isinstance(method, str):
            raise RequestError("method is not a name: no function is sent to workers", "method")
        if method not in CALLED_BY_NAME:
            raise RequestError(f"method={method!r} is not one of {', '.join(CALLED_BY_NAME)}", "method")
        if kwargs or timeout is not None:
            raise RequestError("kwargs and timeout are not supported: give args, and wait", "kwargs")
        results: list[Any] = msgspec.json.decode(await self._client.call("collective_rpc", method, *args))
        return results

    async def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> list[list[str]]:
        """Write what each rank reads of the checkpoint into files of its own in the folder `path`, beside what else the
        model's folder says; the names of the files by rank. Loaded with load_format "sharded_state" by as many ranks.
        `pattern`: of the names, with {rank} and {part}; `max_size`: bytes of a file, unless one tensor has more.
        Requests wait meanwhile. Raises ConfigError for a folder that cannot be written, and GGUF files."""
        return await self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the workers compute, until `stop_profile`. `profile_prefix`: folder and beginning of the names of
        the files (default: pagemill-profile, in the current folder). Raises ConfigError when a recording is under way,
        or there is no such folder."""
        await self.collective_rpc("start_profile", args=(profile_prefix or "pagemill-profile",))

    async def stop_profile(self) -> list[str]:
        """End the recording; the files of Chrome traces, one per worker. Raises ConfigError when there is none."""
        return await self.collective_rpc("stop_profile")

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raises EngineDeadError when requests are not worked on as they should be."""
        problem = self._client.problem()
        if problem is not None:
            raise EngineDeadError(problem)

    async def is_tracing_enabled(self) -> bool:
        """False: nothing is traced."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which for a method of vLLM says what to do instead."""
        raise refused_method("AsyncLLM", name)
