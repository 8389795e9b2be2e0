"""The measured links between members: kept on the controller by `shoal bench links`, read by every `up`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Directory, Document, File
from shoal.network.links import LINKS, NCCL, nccl_settings, sockets
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster


class Links(Part):
    """Where links were measured, Slurm's topology comes of it, and on nodes what NCCL is told."""

    files: Mapping[str, How] = {LINKS: "text", NCCL: "there"}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "compute" not in member.roles:
            return {}
        controller = cluster.facts.get(cluster.controller.name)
        measured = controller.files.get(LINKS) if controller else None
        nodes = [other.name for other in cluster.members if "compute" in other.roles and other.site == member.site]
        found = sockets((measured and measured.text) or "", member.name, nodes)
        if found is None:
            was = cluster.facts[member.name].files.get(NCCL)
            return {Stage.NODES: (File(NCCL),)} if was and was.there else {}
        return {Stage.NODES: (Directory("/etc/shoal"), File(NCCL, nccl_settings(found)))}

    def farewell(self) -> Document:
        return (File(LINKS), File(NCCL))
