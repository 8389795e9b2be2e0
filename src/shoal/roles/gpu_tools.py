"""NVIDIA's container tools on nodes with its GPUs, where the file asks for them: for podman, Docker and enroot.

The engine `oci` needs none of it. Which GPUs a container may open is decided by the job's cgroup.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Command, Directory, Document, File, Packages
from shoal.agent.facts import Facts
from shoal.remote import shell_command
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

ADDRESS = "https://nvidia.github.io/libnvidia-container"
KEYRING = "/usr/share/keyrings/shoal-nvidia-containers.asc"
SOURCE = "/etc/apt/sources.list.d/shoal-nvidia-containers.list"
PACKAGE = "nvidia-container-toolkit"
DEVICES = "/etc/cdi/shoal-nvidia.yaml"
"""The node's GPUs, as podman names them: `nvidia.com/gpu=0`. The tools' own list in /run/cdi precedes it."""
FIX = f"see whether the host reaches {ADDRESS}, or install {PACKAGE} by hand"
ADD_SOURCE = f"""set -e
/usr/lib/apt/apt-helper download-file {ADDRESS}/gpgkey {KEYRING}
echo 'deb [signed-by={KEYRING}] {ADDRESS}/stable/deb/$(ARCH) /' > {SOURCE}.new
mv {SOURCE}.new {SOURCE}
"""
# apt rejects two sources of one server with different keys: an administrator's own one is used as it is.
HAS_SOURCE = f"""apt-cache show {PACKAGE} > /dev/null 2>&1 ||
grep -qrsF libnvidia-container /etc/apt/sources.list /etc/apt/sources.list.d --include='*.list' --include='*.sources'
"""
IS_DESCRIBED = "nvidia-ctk cdi list 2> /dev/null | grep -q nvidia.com/gpu"


class GpuToolsComponent(Component):
    """The file's `containers: {nvidia: true}`."""

    files: Mapping[str, FileQuery] = dict.fromkeys((SOURCE, DEVICES), "there")

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts_of(member.name)
        if not _wants_tools(cluster.spec, member):
            is_left = facts.has_file(SOURCE) or facts.has_file(DEVICES)
            return {Stage.SERVICES: self.removal()} if is_left else {}
        return {Stage.SERVICES: _tools()} if facts.gpus and not _obstacle(facts) else {}

    def removal(self) -> Document:
        """The package stays: somebody else may use it by now."""
        return (File(SOURCE), File(KEYRING), File(DEVICES))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        nodes = {member.name: cluster.facts_of(member.name) for member in cluster.members
                 if _wants_tools(cluster.spec, member)}  # fmt: skip
        problems = {name: _obstacle(facts) for name, facts in nodes.items() if facts.gpus}
        what = "Shoal does not install NVIDIA's container tools here"
        return tuple(
            Finding("warning", what, problem, f"install {PACKAGE} by hand", host=name, path="containers.nvidia")
            for name, problem in problems.items()
            if problem
        )


def _wants_tools(spec: Spec, member: Member) -> bool:
    return spec.containers is not None and spec.containers.nvidia and "compute" in member.roles


def _obstacle(facts: Facts) -> str:
    return "" if facts.package_manager == "apt" else f"its package manager is {facts.package_manager}"


def _tools() -> Document:
    describe = ("nvidia-ctk", "cdi", "generate", f"--output={DEVICES}")
    add_source = shell_command(ADD_SOURCE)
    return (
        Command("add the source of NVIDIA's container tools", add_source, unless=shell_command(HAS_SOURCE), fix=FIX),
        Packages((PACKAGE,), fix=FIX),
        Directory("/etc/cdi"),
        Command("describe the GPUs for containers", describe, unless=shell_command(IS_DESCRIBED)),
    )
