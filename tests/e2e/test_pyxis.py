"""The engine pyxis with a plugin and a package of the project's own: what hosts get, and its removal."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, running

from shoal.roles.pyxis import HOOK, SETTINGS
from shoal.spec.containers import ENROOT, PLUGIN
from shoal.spec.files import PLUGSTACK

pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]  # a host installs a compiler

SPEC = """\
cluster: st-pyxis
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 1, memory: 1G}
"""
SECTION = "containers: {engine: pyxis, enroot: enroot.deb, plugin: spank_pyxis.so}\n"
SOURCE = Path(__file__).with_name("spank_example.c").read_text()
MAKE = r"""
set -e
cd "$(mktemp -d)"
printf %s "$1" > example.c
gcc -shared -fPIC -w -o /run/spank_pyxis.so example.c
mkdir -p enroot/DEBIAN enroot/usr/bin enroot/usr/share/enroot/hooks.d
printf '%s\n' 'Package: enroot' 'Version: 0.1' 'Architecture: all' 'Maintainer: nobody' 'Description: example' \
    > enroot/DEBIAN/control
printf '#!/bin/sh\necho example\n' > enroot/usr/bin/enroot
printf '#!/bin/sh\n' > enroot/usr/share/enroot/hooks.d/50-slurm-pytorch.sh
chmod 755 enroot/usr/bin/enroot
dpkg-deb --root-owner-group --build enroot /run/enroot.deb > /dev/null
"""


def make_files(cluster: Cluster) -> None:
    """The operator's files beside the spec, made on a node: its Slurm is the cluster's."""
    cluster.on("n1", "sh", "-c", MAKE, "sh", SOURCE)
    for name in ("spank_pyxis.so", "enroot.deb"):
        (cluster.file.parent / name).write_bytes(base64.b64decode(cluster.on("n1", "base64", f"/run/{name}")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("pyxis"), SPEC) as made:
        made.install({"n1": "gcc libc6-dev libslurm-dev"})
        make_files(made)
        yield made


def test_plugin_is_loaded_on_all_hosts(cluster: Cluster) -> None:
    before = cluster.on("controller", "srun", "--help")
    assert "container-image" not in before
    cluster.file.write_text(cluster.file.read_text() + SECTION)
    cluster.json("up")
    run = "srun --container-image=alpine -C pyxis sh -c 'echo $EXAMPLE_IMAGE $EXAMPLE_SCOPE'"
    assert cluster.on("controller", "sh", "-c", run).split() == ["alpine", "container_scope=global"]
    script = shlex.quote("#!/bin/sh\n#SBATCH --container-image=batch\necho $EXAMPLE_IMAGE\n")
    submit = "sbatch --wait -o /shared/job.out job.sh > /dev/null"
    batch = f"cd /shared && printf %s {script} > job.sh && {submit} && cat job.out"
    assert cluster.on("controller", "sh", "-c", batch) == "batch\n"
    assert cluster.on("n1", "srun", "true") == ""
    assert cluster.on("n1", "enroot") == "example\n"
    assert cluster.on("n1", "stat", "-c", "%a", "/run/enroot", "/var/lib/enroot").split() == ["1777", "1777"]
    assert cluster.on("n1", "ls", HOOK).strip() == HOOK
    assert cluster.json("up")["changed"] == []


def test_node_that_was_started_again_has_its_directories(cluster: Cluster) -> None:
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: "IDLE" in cluster.states()["n1"] and cluster.answers("n1"))
    run = "srun --container-image=again sh -c 'echo $EXAMPLE_IMAGE; stat -c %a /run/enroot'"
    assert cluster.on("controller", "sh", "-c", run).split() == ["again", "1777"]


def test_removed_section_removes_the_plugin(cluster: Cluster) -> None:
    cluster.edit(SECTION, "")
    cluster.json("up")
    assert "container-image" not in cluster.on("controller", "srun", "--help")
    for host in ("controller", "n1"):
        assert cluster.on(host, "ls", PLUGIN, ENROOT, SETTINGS, HOOK, status=None) == ""
    assert "spank_pyxis" not in cluster.on("controller", "sh", "-c", f"cat {PLUGSTACK} 2> /dev/null; true")
    assert cluster.on("controller", "srun", "hostname") == "n1\n"
    assert cluster.json("up")["changed"] == []
