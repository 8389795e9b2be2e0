"""Container engines in tests: what they have, and the network outside of a cluster."""

import os

from tests.e2e.cluster import KIND

from shoal.sandbox.engine import find_engine


def engine_lists(name: str) -> list[list[str]]:
    """Commands that list all that an engine has: containers, networks, volumes."""
    return [[*find_engine(name).prefix, *list] for list in (["ps", "-a"], ["network", "ls"], ["volume", "ls"])]


def outside_prefix() -> list[str]:
    """What runs a command on the machine's side of the cluster's network: that of rootless podman is a namespace."""
    if KIND == "podman" and os.geteuid() != 0:
        return [*find_engine("podman").prefix, "unshare", "--rootless-netns"]
    return []
