"""`choose_platform`: from the setting to the platform. Knows platforms only by what they say of themselves."""

from pagemill.catalog.platforms import PLATFORMS
from pagemill.errors import ConfigError
from pagemill.platforms.interface import Platform


def choose_platform(device: str) -> Platform:
    """The platform of that name; for auto the first that is here. Raises ConfigError that says why one is not."""
    for name in PLATFORMS if device == "auto" else (device,):
        platform: Platform = PLATFORMS.resolve(name)()
        reason = platform.absence()
        if reason is None:
            return platform
    raise ConfigError(f"device={device!r} cannot be used: {reason}; use --device cpu or --device auto")
