"""The engine pyxis in the file: its files, its rules, and the hosts that cannot run it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.plan.fake_world import host_facts

from shoal.agent.document import Command, File
from shoal.agent.facts import FileFact
from shoal.errors import ShoalError
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.compute import slurmd_defaults
from shoal.roles.documents import documents
from shoal.roles.images import LIMIT
from shoal.roles.pyxis import MAKE, PACKAGES, PyxisComponent, exclusion
from shoal.spec.containers import ENROOT, PLUGIN, PLUGSTACK_LINE
from shoal.spec.files import PLUGSTACK
from shoal.spec.loader import load_all
from shoal.spec.model import Spec

SECTION = "containers: {engine: pyxis, enroot: enroot.deb, plugin: spank_pyxis.so}\n"
ELF = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + bytes(8)


def spec(place: Path, section: str = SECTION, plugin: bytes = ELF) -> Spec:
    (place / "enroot.deb").write_bytes(b"package")
    (place / "spank_pyxis.so").write_bytes(plugin)
    (place / "shoal.yaml").write_text(
        f"cluster: reef\ncontroller: {{host: c1}}\nnodesets: {{lab: {{hosts: [n1]}}}}\n{section}"
    )
    return load_all(place / "shoal.yaml")[0]


def test_plugin_is_everywhere_before_slurm_reads_of_it(tmp_path: Path) -> None:
    able = replace(host_facts("n1", "10.0.0.1", files={LIMIT: FileFact(text="100\n")}), arch="x86_64")
    facts = {"c1": able, "n1": able}
    cluster = assemble(spec(tmp_path), facts, {})
    paths = {
        member.name: [item.path for item in documents(cluster, member)[Stage.SERVICES] if isinstance(item, File)]
        for member in cluster.members
    }
    assert PLUGIN in paths["c1"] and PLUGIN in paths["n1"]
    assert PLUGSTACK in paths["c1"] and PLUGSTACK not in paths["n1"]
    assert ENROOT in paths["n1"] and ENROOT not in paths["c1"]
    assert PLUGSTACK_LINE in cluster.spec.files[PLUGSTACK].content.decode()
    node = documents(cluster, cluster.members[1])
    commands = [item.name for item in node[Stage.SERVICES] if isinstance(item, Command)]
    assert "install enroot" in commands and "put enroot's PyTorch hook in place" in commands
    assert "pyxis" in cluster.conf.nodes[0].features and not cluster.conf.oci
    # slurmd starts anew with a plugin, and with a changed one.
    marks = {slurmd_defaults("", replace(cluster.conf, spank=digest)) for digest in ("", "a", "b")}
    assert len(marks) == 3 and cluster.conf.spank
    component = PyxisComponent()
    assert component.packages(cluster.spec, cluster.members[1], None) == PACKAGES
    assert component.packages(cluster.spec, cluster.members[0], None) == ()


def test_hosts_that_cannot_run_it_are_named(tmp_path: Path) -> None:
    able = host_facts("n1", "10.0.0.1", files={LIMIT: FileFact(text="100\n")})
    assert (
        exclusion(spec(tmp_path), replace(able, arch="aarch64")) == "the plugin is for x86_64, and this host is aarch64"
    )
    unable = host_facts("n1", "10.0.0.1", files={LIMIT: FileFact(text="0\n")})
    cluster = assemble(spec(tmp_path), {"c1": able, "n1": replace(unable, arch="x86_64")}, {})
    [finding] = PyxisComponent().findings(cluster)
    assert (finding.host, finding.found) == ("n1", "user.max_user_namespaces is 0")
    assert "pyxis" not in cluster.conf.nodes[0].features


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("containers: pyxis\n", "the engine pyxis needs your file of enroot"),
        ("containers: {engine: oci, plugin: x.so}\n", "the engine oci needs no such file"),
        ("containers: {engine: pyxis, enroot: enroot.deb, plugin: absent.so}\n", "cannot read the source"),
        (SECTION.replace("}", ", disk: 50G}"), "only the engine oci has a limit on disks"),
        (f"{SECTION}files: {{/etc/slurm/plugstack.conf: enroot.deb}}\n", "the engine pyxis writes this file"),
    ],
)
def test_files_must_be_there(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(ShoalError) as error:
        spec(tmp_path, section)
    assert message in str(error.value)


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user: run it as root")
def test_directory_that_somebody_else_made_first_goes_with_its_content(tmp_path: Path) -> None:
    place, settings = tmp_path / "enroot", tmp_path / "shoal.conf"
    lines = [f"d {place} 1777 root root", *(f"d {place}/user-{number} 0700 root root" for number in (1, 2, 3))]
    settings.write_text("# Of Shoal.\n" + "".join(f"{line}\n" for line in lines))
    for number in (1, 2):
        (place / f"user-{number}").mkdir(parents=True)
        (place / f"user-{number}/pyxis_nccl").write_text("rootfs")
    os.chown(place / "user-1", 65534, 65534)
    (place / "user-3").symlink_to(tmp_path)
    subprocess.run(["sh", "-c", MAKE, settings], check=True)
    assert list((place / "user-1").iterdir()) == [] and (place / "user-1").stat().st_uid == 0
    assert (place / "user-2/pyxis_nccl").exists()
    assert not (place / "user-3").is_symlink() and settings.exists()
    assert place.stat().st_mode & 0o7777 == 0o1777 and (place / "user-1").stat().st_mode & 0o7777 == 0o700
