"""torch on the hosts of a sandbox cluster, for tests of real training."""

import subprocess
import sys
from collections.abc import Mapping

from tests.documents import ROOT

PYTHONPATH = "/shared/env"
"""Where the hosts find the packages: `shoal run --export PYTHONPATH=/shared/env`."""


def give_torch(cluster: str, env: Mapping[str, str] | None = None) -> str:
    """Put torch and the packages of examples/toy where all hosts of a cluster that is up see them; where that is.

    The first call on a machine installs them, which takes a minute or two; later ones take a second.
    """
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/environment", cluster],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert made.returncode == 0, f"{made.stdout[-2000:]}\n{made.stderr[-2000:]}"
    return PYTHONPATH
