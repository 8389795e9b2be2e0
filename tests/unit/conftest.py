"""How hypothesis looks for counterexamples: with patience, as a busy machine may take long for any of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
