"""Rules for unit tests: how fast hypothesis finds its examples says nothing on a machine that does much else, and
`make check` looks at a quarter of them."""

import os

from hypothesis import HealthCheck, settings

if not os.environ.get("CI"):  # there hypothesis has a profile of its own, which does not measure either
    settings.register_profile("unmeasured", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unmeasured")
settings.register_profile("quick", max_examples=25)  # --hypothesis-profile chooses it, before tests are imported
