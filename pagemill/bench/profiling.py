"""Records what the GPU does while a block of code runs, with torch.profiler. Draws no conclusions: see gpu_timeline."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pagemill.errors import ConfigError


@contextlib.contextmanager
def gpu_trace(path: Path) -> Iterator[None]:
    """Write the Chrome trace of the body to `path` (.json or .json.gz): the GPU's activities only, as recording the
    CPU's would slow down what feeds the GPU. Only work that this process launches is seen.

    Raises ConfigError where there is no GPU, or `path` cannot be written.
    """
    import torch  # heavy, and needed only here

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here to profile")
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"the profile's file {path} must end in .json or .json.gz")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        yield
        torch.cuda.synchronize()
    try:
        recorded.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
