"""The one deadline of the tests."""

from __future__ import annotations

DEADLINE_S = 120.0
"""How long a test waits for what has to come. A machine that is four times slower and busy comes nowhere near it, so that
reaching it is a failure and never a matter of pace; whoever waits returns as soon as the thing is there."""
