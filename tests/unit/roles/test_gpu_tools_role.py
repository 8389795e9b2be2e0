"""NVIDIA's container tools: which nodes get them, from where, and what is left when the file no longer asks."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.support.cases import cases
from tests.support.fake_world import gpus, host_facts

from shoal.agent.document import Document, File
from shoal.agent.facts import Facts, FileFact
from shoal.roles import gpu_tools
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.documents import documents
from shoal.roles.gpu_tools import DEVICES, KEYRING, PACKAGE, SOURCE, GpuToolsComponent
from shoal.spec.loader import load_text

TEXT = "cluster: reef\ncontroller: {{host: c1}}\nnodesets: {{lab: {{hosts: [n1, n2]}}}}\ncontainers: {}\n"
ASKED = "{podman: true, nvidia: true}"


def cluster_of(containers: str, first: Facts) -> Cluster:
    facts = {"c1": host_facts("c1", "10.0.0.1"), "n1": first, "n2": host_facts("n2", "10.0.0.3")}
    return assemble(load_text(TEXT.format(containers), "shoal.yaml"), facts, {})


def tools_of(cluster: Cluster, name: str) -> Document:
    [member] = [member for member in cluster.members if member.name == name]
    items = GpuToolsComponent().documents(cluster, member).get(Stage.SERVICES, ())
    assert set(items) <= set(documents(cluster, member).get(Stage.SERVICES, ()))
    return items


def node(**changes: object) -> Facts:
    return replace(host_facts("n1", "10.0.0.2"), gpus=gpus(2), **changes)  # type: ignore[arg-type]


def test_nodes_with_gpus_get_the_tools_where_the_file_asks() -> None:
    cluster = cluster_of(ASKED, node())
    source, packages, _, describe = tools_of(cluster, "n1")
    assert packages.names == (PACKAGE,) and gpu_tools.ADDRESS in packages.fix
    assert f"signed-by={KEYRING}" in " ".join(source.argv) and f"--output={DEVICES}" in describe.argv
    assert tools_of(cluster, "c1") == tools_of(cluster, "n2") == ()
    assert tools_of(cluster_of("oci", node()), "n1") == ()


def test_deleted_setting_removes_what_is_ours() -> None:
    for path in (SOURCE, DEVICES):
        cluster = cluster_of("oci", node(files={path: FileFact(there=True)}))
        assert tools_of(cluster, "n1") == (File(SOURCE), File(KEYRING), File(DEVICES))


def test_other_package_manager_is_a_finding() -> None:
    cluster = cluster_of(ASKED, node(package_manager="dnf"))
    assert tools_of(cluster, "n1") == ()
    [finding] = GpuToolsComponent().findings(cluster)
    assert finding.host == "n1" and "dnf" in finding.found and PACKAGE in finding.fix


@cases("name", "nvidia.list", "nvidia.sources", "")
def test_source_of_an_administrator_is_used(name: str, tmp_path: Path) -> None:
    """The real check, with the directory of apt replaced and no package known."""
    if name:
        (tmp_path / name).write_text(f"deb {gpu_tools.ADDRESS}/stable/deb/amd64 /\n")
    (tmp_path / "apt-cache").write_text("#!/bin/sh\nexit 100\n")
    (tmp_path / "apt-cache").chmod(0o755)
    program = gpu_tools.HAS_SOURCE.replace("/etc/apt/sources.list.d", str(tmp_path))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(["sh", "-c", program], env=environment, check=False).returncode == 0
    assert found == bool(name)
