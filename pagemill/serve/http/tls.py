"""`Tls`: the certificate of a server, from files that may be replaced while it runs. Does not know who connects."""

import contextlib
import ssl
from pathlib import Path

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.log import get_logger

logger = get_logger(__name__)


class Tls:
    """A context for connections, made of files. Raises ConfigError for files that cannot be used."""

    def __init__(self, config: ServerConfig) -> None:
        self._certificate = Path(config.ssl_certfile or "")
        self._key = Path(config.ssl_keyfile) if config.ssl_keyfile else None
        self._follows = config.enable_ssl_refresh
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.context.load_cert_chain(self._certificate, self._key)
            if config.ssl_ca_certs:
                self.context.load_verify_locations(config.ssl_ca_certs)
            if config.ssl_ciphers:
                self.context.set_ciphers(config.ssl_ciphers)
            self.context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(
                f"ssl_certfile={config.ssl_certfile!r}, ssl_keyfile={config.ssl_keyfile!r}, "
                f"ssl_ca_certs={config.ssl_ca_certs!r}, ssl_ciphers={config.ssl_ciphers!r} and "
                f"ssl_cert_reqs={config.ssl_cert_reqs} cannot be used: {error}"
            ) from None
        self._seen = self._stamps()

    @classmethod
    def of(cls, config: ServerConfig) -> "Tls | None":
        """None where there is no certificate. Raises ConfigError, also for what needs one."""
        if config.ssl_certfile:
            return cls(config)
        asked = [name for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh")
                 if getattr(config, name)]  # fmt: skip
        if asked:
            raise ConfigError(f"{asked[0]} needs ssl_certfile: there is no certificate")
        return None

    def refresh(self) -> None:
        """Load the files again when they have changed, where that is asked for; what cannot be used is said, and leaves
        the certificate as it is. Connections that are open keep theirs."""
        if not self._follows or (stamps := self._stamps()) == self._seen:
            return
        self._seen = stamps
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key)
            self.context.load_cert_chain(self._certificate, self._key)
        except OSError as error:
            logger.error("the new certificate cannot be used, and the old one stays: %s", error)
        else:
            logger.info("the certificate was loaded again")

    def _stamps(self) -> list[tuple[int, int]]:
        """What tells a file from an older one. Of one that is being replaced there is none."""
        found = []
        for path in (self._certificate, self._key):
            with contextlib.suppress(OSError):
                if path is not None:
                    stat = path.stat()
                    found.append((stat.st_mtime_ns, stat.st_ino))
        return found
