"""The order in which a cluster comes up."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """All hosts finish a stage before any begins the next: nodes take their configuration from a running controller."""

    BASE = 1
    """Accounts, packages, keys, names, the firewall."""
    SERVICES = 2
    """What slurmctld and the jobs rely on: the network, the database, the server of a share."""
    CONTROLLER = 3
    NODES = 4
    """What relies on a running cluster: slurmd, mounts of shares."""
