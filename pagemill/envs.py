"""The only place that reads the environment. Debug and infrastructure switches; features are arguments.

Every variable is a function with a docstring, so that `PAGEMILL_X` is found by searching for `x()`.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pagemill.errors import ConfigError

MIN_SECRET_CHARS = 16
_REPORTED = ("PAGEMILL_", "VLLM_", "CUDA_", "NVIDIA_", "HF_", "OMP_", "MKL_", "NCCL_", "TORCH", "RAY_", "XDG_CACHE")
_PLAIN = frozenset(
    {
        *("LOGGING_LEVEL", "LOG_STATS_INTERVAL", "NATIVE_KERNELS", "DEPENDENT_LAUNCH", "CPU_OMP_THREADS_BIND"),
        *("PLUGINS", "USE_V1", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *("OMP_WAIT_POLICY", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "NCCL_DEBUG", "NCCL_P2P_DISABLE"),
    }
)
"""Variables, with or without the prefix PAGEMILL_ or VLLM_, whose value is a number or a word."""


def _read(name: str) -> str | None:
    """Value of PAGEMILL_<name>; VLLM_<name> is accepted as an alias. Empty counts as unset."""
    return os.environ.get(f"PAGEMILL_{name}") or os.environ.get(f"VLLM_{name}") or None


def cache_home() -> Path:
    """PAGEMILL_CACHE_ROOT: where downloaded models and compiled kernels are kept (default ~/.cache/pagemill)."""
    given = _read("CACHE_ROOT")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagemill"


def log_level() -> str:
    """PAGEMILL_LOGGING_LEVEL: DEBUG, INFO (default), WARNING or ERROR."""
    level = (_read("LOGGING_LEVEL") or "INFO").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"PAGEMILL_LOGGING_LEVEL={level!r} is not one of DEBUG, INFO, WARNING, ERROR")
    return level


def api_key() -> str | None:
    """PAGEMILL_API_KEY: the key that clients must send, when --api-key is not given. Raises ConfigError when it is set
    and empty: whoever sets it does not mean to serve everybody."""
    key = _read("API_KEY")
    if key is None and ("PAGEMILL_API_KEY" in os.environ or "VLLM_API_KEY" in os.environ):
        raise ConfigError("PAGEMILL_API_KEY is empty; set it to a key, or unset it")
    return key


def log_stats_interval_s() -> float:
    """PAGEMILL_LOG_STATS_INTERVAL: seconds between the lines of figures in a server's log (default 5)."""
    given = _read("LOG_STATS_INTERVAL")
    try:
        interval = 5.0 if given is None else float(given)
    except ValueError:
        interval = 0.0
    if not 0 < interval < math.inf:
        raise ConfigError(f"PAGEMILL_LOG_STATS_INTERVAL={given!r} is not allowed: seconds, more than 0")
    return interval


def cpu_threads_bind() -> str | None:
    """PAGEMILL_CPU_OMP_THREADS_BIND: what --cpu-threads-bind says, when it is not given and a CPU computes."""
    return _read("CPU_OMP_THREADS_BIND")


def batch_invariant() -> bool:
    """PAGEMILL_BATCH_INVARIANT=1: what --deterministic says."""
    return _read("BATCH_INVARIANT") == "1"


def compiler() -> str:
    """CXX: the C++ compiler that builds the CPU kernels (default g++)."""
    return os.environ.get("CXX") or "g++"


def c_compiler() -> str | None:
    """CC: the C compiler that builds what sends weights to a GPU (default cc, gcc or clang)."""
    return os.environ.get("CC") or None


def native_kernels() -> bool:
    """PAGEMILL_NATIVE_KERNELS=0 turns the C++ kernels off and uses the torch reference instead."""
    return _read("NATIVE_KERNELS") != "0"


def dependent_launch() -> bool | None:
    """PAGEMILL_DEPENDENT_LAUNCH: 0, GPU kernels start when the one before them has ended; 1, before that (default:
    where the GPU can, from compute capability 9.0 on)."""
    given = _read("DEPENDENT_LAUNCH")
    return None if given is None else given == "1"


def ipc_base() -> Path | None:
    """PAGEMILL_RPC_BASE_PATH: where the private folders of ipc sockets are made (default the temporary folder)."""
    given = _read("RPC_BASE_PATH")
    return Path(given) if given else None


def ipc_secret() -> str | None:
    """PAGEMILL_IPC_SECRET: what the machines of one server prove to each other that they belong together with; at least
    16 characters."""
    secret = _read("IPC_SECRET")
    if secret is not None and len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"PAGEMILL_IPC_SECRET has {len(secret)} characters; at least {MIN_SECRET_CHARS} are needed, such as "
            "openssl rand -hex 32"
        )
    return secret


def plugins() -> list[str] | None:
    """PAGEMILL_PLUGINS: names of the plug-ins to load, by commas; empty: none (default: all that are installed)."""
    given = os.environ.get("PAGEMILL_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def prefix_hash_seed() -> str | None:
    """PYTHONHASHSEED: pins the hashes of cached prefixes, so that several processes agree on them (default: random)."""
    seed = os.environ.get("PYTHONHASHSEED")
    return None if seed in (None, "", "random") else seed


def ray_address() -> str | None:
    """RAY_ADDRESS: the Ray cluster for --distributed-executor-backend ray (default: one that runs on this machine)."""
    return os.environ.get("RAY_ADDRESS") or None


def server_dev_mode() -> bool:
    """PAGEMILL_SERVER_DEV_MODE=1: the HTTP server has the operator's routes, such as /reset_prefix_cache, too."""
    return _read("SERVER_DEV_MODE") == "1"


def profiler_folder() -> Path | None:
    """PAGEMILL_TORCH_PROFILER_DIR: the folder for what /start_profile records (default: nothing is recorded)."""
    folder = _read("TORCH_PROFILER_DIR")
    return None if folder is None else Path(folder).expanduser().absolute()


def shown_cuda_devices() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used; None: all."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if shown is None else [name.strip() for name in shown.split(",") if name.strip()]


def show_cuda_devices(names: Sequence[str]) -> None:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used; in a Ray actor set to those of its engine's workers there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def tokenizers_have_threads() -> bool:
    """TOKENIZERS_PARALLELISM: whether a batch of texts is tokenized by several threads; a server says no by itself."""
    return os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in ("", "off", "false", "f", "no", "n", "0")


def leave_tokenizers_one_thread() -> None:
    """TOKENIZERS_PARALLELISM: set to false, also for the processes that are started from here, unless it is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def keep_compiled_code(folder: Path) -> None:
    """TORCHINDUCTOR_CACHE_DIR: where torch.compile keeps compiled code; set to compilation_config.cache_dir."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def report() -> list[tuple[str, str]]:
    """PAGEMILL_*, VLLM_*, CUDA_*, HF_*, OMP_* and a few more: `pagemill collect-env` names those that are set, with the
    value only where it can be neither a secret nor a path."""
    found = sorted(name for name in os.environ if name.startswith(_REPORTED))
    return [(name, os.environ[name] if {name, name.partition("_")[2]} & _PLAIN else "set") for name in found]


def unread() -> list[str]:
    """PAGEMILL_*, VLLM_*: any other such variable changes nothing; start-up names those that are set."""
    documented = "\n".join(str(value.__doc__) for value in list(globals().values()) if callable(value))
    known = {name.removeprefix("PAGEMILL_") for name in re.findall(r"PAGEMILL_\w+", documented)}
    ours = [name for name in os.environ if name.startswith(("PAGEMILL_", "VLLM_"))]
    return sorted(name for name in ours if name.partition("_")[2] not in known)
