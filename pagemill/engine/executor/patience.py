"""How long an executor waits for workers that are not in its process."""

from typing import Final

STEP_TIMEOUT_S: Final = 300.0
CALL_TIMEOUT_S: Final = 1800.0
"""Loading a large model from a slow disk takes long; a worker that is gone or silent is noticed much earlier."""
FAILED_CALL_S: Final = 5.0
"""How long the other workers may take to answer a call that failed on one of them."""
STOP_GRACE_S: Final = 2.0
