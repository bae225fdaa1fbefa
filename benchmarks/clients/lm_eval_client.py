"""lm-evaluation-harness on a server and on transformers, of the same random checkpoint: the numbers are the same.

It needs a checkpoint whose weights transformers reads too, so it serves one of its own: PAGEMILL is the interpreter
that has pagemill and the tests. See tests/conformance/lm_eval_side_by_side.py, which does the comparison.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checks import Server, expect, run

ROOT = Path(__file__).resolve().parents[2]
START_S = 300
MAKE = """
import sys
from pathlib import Path
from tests.fakes.tiny_checkpoint import make_checkpoint
make_checkpoint(Path(sys.argv[1]), "LlamaForCausalLM")
"""


def numbers(server: Server) -> None:
    pagemill = os.environ["PAGEMILL"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        subprocess.run([pagemill, "-c", MAKE, folder], cwd=ROOT, check=True)
        command = [pagemill, "-m", "pagemill", "serve", folder, "--port", "0", "--dtype", "float32"]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"ready: (http://\S+)", said := os.pread(log.fileno(), 1 << 20, 0).decode())):
                expect(process.poll() is None and time.monotonic() < deadline, said[-300:])
                time.sleep(0.1)
            compare = [sys.executable, "tests/conformance/lm_eval_side_by_side.py", folder, found[1]]
            done = subprocess.run(compare, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        finally:
            process.terminate()
            process.wait()
    print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    expect(done.returncode == 0, (done.stdout or done.stderr)[-300:])


if __name__ == "__main__":
    raise SystemExit(run(numbers=numbers))
