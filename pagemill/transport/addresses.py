"""Where sockets live: a private folder for ipc sockets, and tcp addresses for other machines.

Knows nothing about who listens there.
"""

import contextlib
import fcntl
import ipaddress
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from pagemill import envs
from pagemill.errors import ConfigError

PREFIX = "pagemill-"
LOCK = ".lock"
MAX_IPC_PATH_BYTES = 107
"""Room for a path in sockaddr_un, its final zero left out."""


class PrivateDirectory:
    """A new folder that only this user can enter, for the ipc sockets of one deployment.

    It is removed by `remove` or at the end of a `with` block. One that was left behind by a process that was killed
    is removed when the next one is made: the owner of a folder holds a lock on it as long as it lives.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or envs.ipc_base() or Path(tempfile.gettempdir())
        _remove_stale(base)
        self._lock: int | None
        self.path, self._lock = _make_folder(base)

    def ipc(self, name: str) -> str:
        """Address of a socket in this folder. Raises ConfigError when the path is too long for one."""
        return f"ipc://{self.path_of(name)}"

    def path_of(self, name: str) -> str:
        """The path of the same."""
        path = self.path / name
        if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            raise ConfigError(
                f"the socket path {str(path)!r} has more than {MAX_IPC_PATH_BYTES} bytes: "
                "set PAGEMILL_RPC_BASE_PATH to a shorter folder"
            )
        return str(path)

    def remove(self) -> None:
        """Remove the folder and every socket in it. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "PrivateDirectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def check_private(address: str) -> None:
    """Raise ConfigError unless the folder of an ipc address belongs to this user alone. Other addresses pass."""
    if not address.startswith("ipc://"):
        return
    folder = Path(address.removeprefix("ipc://")).parent
    try:
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the folder of {address} cannot be read: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"the folder of {address} must belong to this user and be closed to others (mode 0700)")


def tcp_address(host: str = "127.0.0.1", port: int = 0) -> str:
    """A tcp address; port 0 takes a free one when it is bound. Raises ConfigError for a host that means every
    interface of the machine: what listens for other processes of a deployment listens on one address."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not allowed: 0 to 65535")
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = host in ("", "*")
    if is_wildcard:
        raise ConfigError(f"host {host!r} is not allowed between processes: name one address of this machine")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def ip_of(host: str) -> str:
    """The IP address of a host. Raises ConfigError when there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the address of host {host!r} cannot be found: {error}") from None


def own_address_towards(host: str) -> str:
    """The IP address of this machine under which another one sees it. Raises ConfigError when there is no way."""
    address = ip_of(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # of a datagram socket: chooses the way, and sends nothing
        except OSError as error:
            raise ConfigError(f"there is no way from this machine to host {host!r}: {error}") from None
        return str(probe.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, for those who must know it before they bind it (torch.distributed)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _make_folder(base: Path) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds the lock on it."""
    while True:
        path: Path | None = None
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
            lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if path is not None:  # without a lock in it, nobody else would take it for abandoned
                path.rmdir()
            raise ConfigError(
                f"no folder for sockets can be made in {base} (PAGEMILL_RPC_BASE_PATH): {error}"
            ) from error
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / LOCK).stat()
            return path, lock
        os.close(lock)  # who clears up took it for abandoned before it was locked


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another owner, another user's, or gone already
            _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    """The lock is held meanwhile: an owner that is about to take it sees that it came too late."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
