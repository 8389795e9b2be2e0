"""The engine pyxis in the file: its files, its rules, and the hosts that cannot run it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts

from shoal.agent.document import Command, File
from shoal.agent.facts import FileFact
from shoal.errors import ShoalError
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.compute import slurmd_defaults
from shoal.roles.documents import documents
from shoal.roles.images import LIMIT
from shoal.roles.pyxis import (
    COPY_HOOKS,
    HAS_HOOKS,
    HOOK_SOURCES,
    HOOKS,
    IS_SWITCHED,
    MAKE,
    PACKAGES,
    PMIX,
    REMOVE,
    SLURM_HOOKS,
    SWITCH_NVIDIA,
    PyxisComponent,
    exclusion,
)
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
    assert "install enroot" in commands and "put enroot's hooks for Slurm in place" in commands
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


def test_host_that_cannot_load_the_plugin_is_an_error(tmp_path: Path) -> None:
    """slurmctld gives `required` to all hosts: there no job of anybody would start."""
    able = replace(host_facts("n1", "10.0.0.1", files={LIMIT: FileFact(text="100\n")}), arch="x86_64")
    for host in ("c1", "n1"):
        facts = {"c1": able, "n1": able} | {host: replace(able, arch="aarch64")}
        [finding] = PyxisComponent().findings(assemble(spec(tmp_path), facts, {}))
        assert (finding.level, finding.host) == ("error", host)
        assert str(finding).startswith(f"{host}: no job starts here: Slurm requires the plugin of pyxis on all hosts")
        assert "the plugin is for x86_64, and this host is aarch64" in str(finding)
        unknown = assemble(spec(tmp_path, plugin=b"\x7fELF" + bytes(24)), facts, {})
        assert PyxisComponent().findings(unknown) == ()


def shell(text: str, place: Path, **variables: str) -> int:
    """Run a program of hosts below a directory."""
    for path in (HOOK_SOURCES, HOOKS, "/proc/driver"):
        text = text.replace(path, f"{place}{path}")
    return subprocess.run(["sh", "-c", text], env={"PATH": f"{place}:/usr/bin:/bin", **variables}).returncode


def test_hooks_for_slurm_are_copied_and_removed(tmp_path: Path) -> None:
    assert shell(HAS_HOOKS, tmp_path) == 0 == shell(COPY_HOOKS, tmp_path), "this enroot has none"
    sources, hooks = Path(f"{tmp_path}{HOOK_SOURCES}"), Path(f"{tmp_path}{HOOKS}")
    sources.mkdir(parents=True)
    for name in SLURM_HOOKS.split():
        (sources / name).write_text(name)
        assert shell(HAS_HOOKS, tmp_path) != 0
    assert shell(COPY_HOOKS, tmp_path) == 0 == shell(HAS_HOOKS, tmp_path)
    assert [(hooks / name).stat().st_mode & 0o777 for name in SLURM_HOOKS.split()] == [0o755, 0o755]
    (hooks / "50-slurm-pmi.sh").write_text("mine")
    assert shell(REMOVE, tmp_path) == 0 and [path.name for path in hooks.iterdir()] == ["50-slurm-pmi.sh"]


def test_hook_for_gpus_is_off_where_nothing_could_serve_it(tmp_path: Path) -> None:
    assert shell(IS_SWITCHED, tmp_path) == 0, "this enroot has none"
    hook, driver = Path(f"{tmp_path}{HOOKS}/98-nvidia.sh"), tmp_path / "proc/driver/nvidia/version"
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)

    def is_on() -> bool:
        assert shell(SWITCH_NVIDIA, tmp_path) == 0 == shell(IS_SWITCHED, tmp_path)
        return bool(hook.stat().st_mode & 0o111)

    assert shell(IS_SWITCHED, tmp_path) != 0 and not is_on()
    driver.parent.mkdir(parents=True)
    driver.touch()
    assert shell(IS_SWITCHED, tmp_path) != 0 and is_on(), "a node with GPUs whose jobs then name the missing tool"
    driver.unlink()
    assert not is_on()
    (tmp_path / "nvidia-container-cli").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-container-cli").chmod(0o755)
    assert is_on()
    (tmp_path / "nvidia-container-cli").unlink()
    assert not is_on() and shell(REMOVE, tmp_path) == 0 and hook.stat().st_mode & 0o777 == 0o755


def test_pmix_of_an_image_meets_the_one_of_the_node(tmp_path: Path) -> None:
    environ = tmp_path / "environ"
    for variables, lines in (
        ({}, ""),
        ({"PMIX_NAMESPACE": "slurm.pmix.1.0"}, "PMIX_MCA_gds=hash\nPMIX_MCA_psec=native\n"),
        ({"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_MCA_gds": "shmem2"}, "PMIX_MCA_psec=native\n"),
    ):
        environ.write_text("")
        assert shell(PMIX, tmp_path, ENROOT_ENVIRON=str(environ), **variables) == 0 and environ.read_text() == lines


@cases(
    "section, message",
    ("containers: pyxis\n", "the engine pyxis needs your file of enroot"),
    ("containers: {engine: oci, plugin: x.so}\n", "the engine oci needs no such file"),
    ("containers: {engine: pyxis, enroot: enroot.deb, plugin: absent.so}\n", "cannot read the source"),
    (SECTION.replace("}", ", disk: 50G}"), "only the engine oci has a limit on disks"),
    (f"{SECTION}files: {{/etc/slurm/plugstack.conf: enroot.deb}}\n", "the engine pyxis writes this file"),
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
    assert (place / "user-2/pyxis_nccl").exists() and not (place / "user-3").is_symlink() and settings.exists()
    assert place.stat().st_mode & 0o7777 == 0o1777 and (place / "user-1").stat().st_mode & 0o7777 == 0o700
