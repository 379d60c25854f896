"""Settings that every test shares."""

from __future__ import annotations

import os

# Set before torch is imported anywhere: two processes with two threads each on two cores lose half to contention.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No per-example deadline: on a shared machine it measures the neighbours. print_blob makes a failure reproducible.
settings.register_profile("timzero", deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("timzero"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "timzero"))
