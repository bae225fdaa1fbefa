"""Whether this process runs in a container, from the files that container runtimes leave."""

import re
from pathlib import Path

_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/var/run/secrets/kubernetes.io": "kubernetes"}
"""File or folder -> what leaves it."""
_GROUPS = re.compile(r"docker|kubepods|containerd|lxc|libpod")


def container(root: Path = Path("/")) -> str | None:
    """The runtime of the container that this process is in; None where it is in none, or nothing shows it. `root` is
    that of the file system."""
    for mark, name in _MARKS.items():
        if (root / mark.lstrip("/")).exists():
            return name
    try:
        found = _GROUPS.search((root / "proc/1/cgroup").read_text())
    except OSError:
        return None
    return found[0] if found else None
