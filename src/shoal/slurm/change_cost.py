"""What a change of slurm.conf costs: nothing, a reconfigure, a restart of slurmctld, or running jobs. Pure."""

from __future__ import annotations

from typing import Literal

from shoal.slurm.read import is_ours, read

ChangeCost = Literal["none", "reconfigure", "restart"]

_STATE_KEYS = ("clustername", "statesavelocation", "selecttype", "slurmuser")
"""What slurmctld's saved state depends on."""


def change_cost(old: str, new: str) -> ChangeCost:
    """What slurmctld needs to take a new slurm.conf: "none", "reconfigure" or "restart". Jobs run on through either.

    Partitions change while slurmctld runs. All else takes a restart: 22.05 cannot add nodes without one, and later
    releases restart themselves on a reconfigure, so there is nothing to win.
    """
    if not is_ours(old):
        return "restart"
    before, after = read(old), read(new)
    if before.settings != after.settings or set(before.nodes) != set(after.nodes):
        return "restart"
    return "none" if set(before.partitions) == set(after.partitions) else "reconfigure"


def loses_jobs(old: str, new: str) -> bool:
    """Whether running jobs die of the change: their node leaves, or slurmctld cannot read its own state any more."""
    if not is_ours(old):
        return True
    before, after = read(old), read(new)
    if any(before.settings.get(key) != after.settings.get(key) for key in _STATE_KEYS):
        return True
    if before.settings.get("authtype") == "auth/slurm" != after.settings.get("authtype"):
        return True  # what they have to say is signed with a key that nobody takes any more
    return not before.node_names() <= after.node_names()
