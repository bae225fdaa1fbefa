"""`Access`: who may use the HTTP server, from the settings as they are given. Does not know how it is enforced."""

import ipaddress
import json
import re
from dataclasses import dataclass

from pagemill import envs
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
_HOST = re.compile(r"[^\s/?#@,:*]*[^\s/?#@,:*.]")


@dataclass(frozen=True)
class Access:
    """Keys, origins and hosts that are accepted."""

    api_keys: tuple[str, ...]
    """One of them is needed; none: everybody is served."""
    origins: tuple[str, ...]
    """Of pages that browsers let use the API, in lower case; `*`: all."""
    hosts: tuple[str, ...] | None
    """Names the server may be called by, other than those that only this machine and its network know; None: any."""


def access_of(config: ServerConfig) -> Access:
    """Raises ConfigError for a key that no client could send, and for what is not an origin or a host."""
    keys = config.api_key if config.api_key is not None else _keys_of_environment()
    if isinstance(keys, str):  # from Python, where it would pass for many keys of one character
        keys = (keys,)
    for key in keys:
        _check_key(key)
    origins = _names(config.allowed_origins, "allowed_origins")
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"allowed_origins: {origin!r} is not an origin, such as https://chat.example, nor *")
    hosts: tuple[str, ...] | None = _names(config.allowed_hosts, "allowed_hosts")
    for host in hosts or ():
        if host != ANY and not _HOST.fullmatch(host):
            raise ConfigError(f"allowed_hosts: {host!r} is not the name of a host, such as chat.example, nor *")
    if (hosts and ANY in hosts) or (config.allowed_hosts is None and (keys or not is_loopback(config.host))):
        hosts = None
    return Access(keys, origins, hosts)


def is_loopback(host: str) -> bool:
    """Whether a server that listens there is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _keys_of_environment() -> tuple[str, ...]:
    key = envs.api_key()
    return () if key is None else (key,)


def _check_key(key: str) -> None:
    """Messages do not quote the key."""
    if not key:
        raise ConfigError("api_key is empty, and would let everybody in; give a key, or leave the setting out")
    if key != key.strip():
        raise ConfigError("api_key has a blank at its beginning or end, which no client can send; leave it out")
    if not key.isprintable():
        raise ConfigError("api_key has a character that is not printable, which no client can send; leave it out")


def _names(given: str | None, setting: str) -> tuple[str, ...]:
    """Of a list separated by commas, or of a JSON list; in lower case."""
    if given is None:
        return ()
    if not given.strip().startswith("["):
        names = [name.strip() for name in given.split(",")]
    else:
        try:
            names = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{setting}={given!r} is not a JSON list: {error}") from None
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"{setting}={given!r} is not allowed: names separated by commas, or a JSON list of them")
    return tuple(name.strip().lower() for name in names)
