"""`make fuzz-api`: schemathesis' own program against the server's OpenAPI document, which also tries the bounds of
every field and methods that a path does not have. Arguments go to `st run`, after those that are always given."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.integration.api.test_openapi import NAMES, server


def main() -> int:
    """Against a model that generates, and one that pools; 1 when either finds something."""
    tool = shutil.which("st", path=Path(sys.executable).parent)
    if tool is None:
        raise SystemExit("there is no schemathesis beside this Python: install the dev extra")
    failed = False
    for kind in ("generates", "pools"):
        with server(kind) as url:
            command = [tool, "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "100"]
            command += ["--checks", ",".join(NAMES), "--continue-on-failure", "--request-timeout", "300"]
            command += ["--suppress-health-check", "too_slow"]  # of making bodies, on a machine that has other work
            environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.integration.api.fuzz_hooks"}
            failed |= subprocess.run([*command, *sys.argv[1:]], check=False, env=environment).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
