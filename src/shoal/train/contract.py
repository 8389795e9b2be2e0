"""The environment variables `shoal run` sets in a job, and the training library reads: named once, here.

A script runs without any of them: each one only takes a guess away.
"""

from __future__ import annotations

from collections.abc import Mapping

SHOAL_JOB_DIR = "SHOAL_JOB_DIR"
"""The job's directory on shared storage: code, logs, checkpoints. The same path on every node."""

SHOAL_STORE_DIR = "SHOAL_STORE_DIR"
"""A directory all nodes of the job see, where rank 0 writes the address and port it listens on."""

SHOAL_NODE_ADDRS = "SHOAL_NODE_ADDRS"
"""The nodes' addresses on the cluster's network, as `name=address,name=address`. Wins over every other source."""

SHOAL_INTERFACE = "SHOAL_INTERFACE"
"""The network interface for NCCL and Gloo, where the user named one. Wins over the route to rank 0."""

SHOAL_RUN_ID = "SHOAL_RUN_ID"
"""Names the training run over all its requeues, where a job id would not."""

SHOAL_GRACE_SECONDS = "SHOAL_GRACE_SECONDS"
"""How long Slurm waits between its warning signal and the kill."""

SHOAL_TRACKING_URI = "SHOAL_TRACKING_URI"
"""The address of the MLflow server. Without a password in it: that comes in MLflow's own variables."""

SHOAL_EXPERIMENT = "SHOAL_EXPERIMENT"
"""The MLflow experiment the run belongs to."""

EXIT_REQUEUE = 85
"""The status a script leaves with when it has saved and wants to go on later, and could not requeue itself."""


def format_node_addrs(addresses: Mapping[str, str]) -> str:
    """The value of SHOAL_NODE_ADDRS for these nodes."""
    return ",".join(f"{name}={address}" for name, address in addresses.items())


def parse_node_addrs(text: str) -> dict[str, str]:
    """The addresses in a value of SHOAL_NODE_ADDRS. ValueError says which part is broken."""
    addresses: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, address = part.partition("=")
        if not (name and equals and address):
            raise ValueError(f"{part!r} is not name=address")
        addresses[name] = address
    return addresses
