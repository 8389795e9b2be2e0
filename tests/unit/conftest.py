"""Settings of hypothesis: no deadline, because an example may take long on a busy machine. What is built once."""

from functools import cache

from hypothesis import HealthCheck, settings

from shoal.roles import runtime_archive

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# Tests have caches of their own, and each would pack the same archive again, which takes seconds.
runtime_archive._build = cache(runtime_archive._build)
