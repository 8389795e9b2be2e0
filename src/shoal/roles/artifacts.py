"""Where the tracking server keeps models and other files: on a share of its host, but never away from those there are.

A run's files are known to MLflow by their path below one directory, so a server that is given another one finds none of
the earlier ones. Which it was is kept on its host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.agent.facts import Facts
from shoal.roles.shares import shares, text_of
from shoal.spec.finding import Finding
from shoal.spec.model import Spec
from shoal.tracking import mlflow

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

RECORD = f"{mlflow.SETTINGS}/artifacts"
"""Where they are; it stays when the server goes."""
OWN_DISK = f"{mlflow.STATE}/artifacts"


def artifacts_of(cluster: Cluster, host: str) -> str:
    """The directory that is named, or else where they were so far, or else on a share of the host or its own disk."""
    named = cluster.spec.tracking.artifacts if cluster.spec.tracking else None
    return named or so_far(cluster.facts.get(host)) or on_a_share(cluster.spec, host) or OWN_DISK


def so_far(facts: Facts | None) -> str:
    """Where those of earlier runs are; empty where no server was."""
    own = facts.files.get(OWN_DISK) if facts else None
    return text_of(facts, RECORD).strip() or (OWN_DISK if own and own.there else "")


def on_a_share(spec: Spec, host: str) -> str:
    """A directory on the first share that the host keeps for others to write to; empty where it keeps none.

    Not on one that another host keeps: the server would stand still with that host. Not on one for SSH alone, where
    every user may move what is another's.
    """
    for share in shares(spec):
        if share.server == host and share.share.kind == "nfs" and not share.homes and not share.share.read_only:
            return f"{share.path}/shoal-mlflow"
    return ""


def artifacts_findings(cluster: Cluster, host: str) -> Iterator[Finding]:
    """Files that the server leaves behind, or that are not where a new server's would be."""
    before, now = so_far(cluster.facts.get(host)), artifacts_of(cluster, host)
    share = on_a_share(cluster.spec, host)
    if before and before != now:
        what = f"files of earlier runs stay in {before}, where the server finds them no more"
        carry = f"carry them along: `shoal ssh {host} cp -a {before}/. {now}/`"
        yield Finding("warning", what, f"`artifacts: {now}`", carry, path="tracking.artifacts", host=host)
    elif before == now == OWN_DISK and share:
        what = f"files of runs stay on the disk of {host}, as they were there before the share was"
        fix = f"say `artifacts: {share}` to have them on the share"
        yield Finding("info", what, before, fix, path="tracking", host=host)
