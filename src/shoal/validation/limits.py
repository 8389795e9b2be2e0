"""Speeds that operators of large clusters have published as the lowest they accept, by GPU and machine.

They concern machines with all GPUs of a model: the limit of eight GPUs says nothing about four of them. Where several
are published for one machine, the one of its vendor counts, else the lowest: a limit must not blame a good node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.hostlist import expand
from shoal.spec.finding import Finding
from shoal.validation.types import ValidationRow

IN_NODE, TWO_NODES, FROM_HOST, BETWEEN_GPUS = "in a node", "two nodes", "from host", "between gpus"


@dataclass(frozen=True)
class PublishedLimit:
    gpu: str
    """A regular expression for the name that the driver gives the GPU."""
    test: str
    limit: float
    """GB/s; of an all-reduce, the bus bandwidth."""
    source: str
    gpus: int = 0
    """GPUs of the node; 0 for any number."""
    vendor: str = ""
    """What the firmware of the source's machines calls their vendor; empty where the source has no machines."""


AZURE, ORACLE, GOOGLE = "Microsoft", "OracleCloud", "Google"
LIMITS = (
    PublishedLimit(r"H100(?! NVL)", IN_NODE, 460, "Azure's node health checks", 8, AZURE),
    PublishedLimit(r"H200", IN_NODE, 431, "Azure's node health checks", 8, AZURE),
    PublishedLimit(r"H100 NVL", IN_NODE, 208, "Azure's node health checks", 2, AZURE),
    PublishedLimit(r"A100", IN_NODE, 228, "Azure's node health checks", 8, AZURE),
    PublishedLimit(r"H100(?! NVL)|H200|B200", IN_NODE, 440, "OCI's active health check", 8, ORACLE),
    PublishedLimit(r"B300", IN_NODE, 800, "OCI's active health check", 8, ORACLE),
    PublishedLimit(r"A100", IN_NODE, 185, "OCI's active health check", 8, ORACLE),
    PublishedLimit(r"MI300X|MI355X", IN_NODE, 310, "OCI's active health check", 8, ORACLE),
    PublishedLimit(r"H100", FROM_HOST, 48, "Azure's node health checks", 0, AZURE),
    PublishedLimit(r"A100", FROM_HOST, 21, "Azure's node health checks", 0, AZURE),
    PublishedLimit(r"H100", BETWEEN_GPUS, 335, "Azure's node health checks", 8, AZURE),
    PublishedLimit(r"A100", BETWEEN_GPUS, 235, "Azure's node health checks", 8, AZURE),
    PublishedLimit(r"H100", TWO_NODES, 60, "Google's cluster health scanner", 8, GOOGLE),
    PublishedLimit(r"H200|(?<!G)B200", TWO_NODES, 250, "Google's cluster health scanner", 8, GOOGLE),
    PublishedLimit(r"GB200", TWO_NODES, 160, "Google's cluster health scanner", 4, GOOGLE),
)
MIN_SIZE = 1 << 30
"""Bytes. Published limits are of large messages; a quick run says nothing about them."""
_SLOW_NETWORKS_TOO = (TWO_NODES,)
"""These limits are of one vendor's network, and say nothing about others."""


def find_limit(row: ValidationRow) -> PublishedLimit | None:
    """The limit for a row, where one is published for this machine."""
    test = _test(row)
    if not test or not row.gpu:
        return None
    nodes = len(row.by_node) or 1
    gpus = row.ranks // 2 if test == TWO_NODES else row.ranks if test == IN_NODE else row.ranks // nodes
    candidates = [
        entry for entry in LIMITS if entry.test == test and re.search(entry.gpu, row.gpu) and entry.gpus in (0, gpus)
    ]
    own = [entry for entry in candidates if entry.vendor and row.vendor.startswith(entry.vendor)]
    if not own and test in _SLOW_NETWORKS_TOO:
        return None
    return min(own or candidates, key=lambda entry: entry.limit, default=None)


def _test(row: ValidationRow) -> str:
    if row.test == "all-reduce nccl in a node" or (row.test == "all-reduce nccl" and len(row.by_node) == 1):
        return IN_NODE if row.sizes and row.sizes[-1].size >= MIN_SIZE else ""
    if row.test == "all-reduce nccl" and row.sizes and row.sizes[-1].size >= MIN_SIZE and len(expand(row.nodes)) == 2:
        return TWO_NODES
    return {"gpu copy from host": FROM_HOST, "gpu copy between gpus": BETWEEN_GPUS}.get(row.test, "")


def limit_findings(rows: Iterable[ValidationRow]) -> list[Finding]:
    """Rows below what is published for their machine, by node where each has a value."""
    findings = []
    for row in rows:
        limit = find_limit(row)
        if limit is None or row.status != "passed" or row.value is None:
            continue
        values = row.by_node or {row.nodes: row.value}
        for name, value in values.items():
            if value < limit.limit:
                what = f"{row.launcher} {row.test} of {row.gpu} is below the published limit".strip()
                text = f"{value:.0f} GB/s; {limit.source} ask for {limit.limit:g}"
                fix = f"`shoal doctor --node {name}`: NVLink, PCIe width, clocks" if row.by_node else _NETWORK_FIX
                host, path = (name, "") if row.by_node else ("", name)
                findings.append(Finding("error", what, text, fix, host=host, path=path))
    return findings


_NETWORK_FIX = "look at NCCL_DEBUG=INFO: which network NCCL chose, and whether it uses GPUDirect"
