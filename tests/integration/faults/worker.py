"""A scripted worker that fails when it is told to: by tokens in a prompt, or by files in a folder.

Apart from served.py, so that cores and workers need not import a web server.
"""

import os
import signal
import time
from pathlib import Path

from pagemill.errors import ModelError
from tests.fakes.scripted_pooling import PoolingWorker
from tests.fakes.scripted_worker import ScriptedWorker

POISON, HANG = 319, 318
"""Prompt tokens that kill the worker, or make it hang."""


class LabWorker(ScriptedWorker):
    """Fails as prompts and files in LAB_FOLDER say; a step takes LAB_STEP_S, or as long as the file "step_s" says."""

    def __init__(self, *_):
        super().__init__()
        self.folder = Path(os.environ["LAB_FOLDER"])
        self.step_s = float(os.environ.get("LAB_STEP_S", "0"))

    def load_model(self):
        if (self.folder / "broken").exists():
            raise ModelError("the weights are gone")
        (self.folder / f"loading-{os.getpid()}").touch()
        while (self.folder / "hold").exists():
            time.sleep(0.01)

    def execute_model(self, step):
        prompts = {token for new in step.new for token in new.token_ids}
        if POISON in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in prompts:
            time.sleep(3600)
        time.sleep(self._step_s())
        super().execute_model(step)
        self.steps.clear()

    def _step_s(self):
        try:
            return float((self.folder / "step_s").read_text())
        except FileNotFoundError:
            return self.step_s


class PoolingLabWorker(LabWorker, PoolingWorker):
    """The same, of prompts that become vectors."""
