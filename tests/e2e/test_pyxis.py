"""The engine pyxis with a plugin and a package of the project's own: what hosts get, and its removal.

With SHOAL_TEST_PYXIS=DIR, the real enroot.deb and spank_pyxis.so in DIR run the lines of pyxis's users instead.
"""

import base64
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, running
from tests.e2e.image_files import debian_layer
from tests.e2e.image_users import shared

from shoal.roles.pyxis import HOOKS, NVIDIA_HOOK, PMIX_HOOK, SETTINGS, SLURM_HOOKS
from shoal.spec.containers import ENROOT, PLUGIN
from shoal.spec.files import PLUGSTACK

COVERS = "roles/pyxis roles/plugins remote/image_archives.py"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]  # a host installs a compiler

SPEC = """\
cluster: st-pyxis
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 1, memory: 1G}
users:
  ann: {uid: 2001}
"""
GIVEN = os.environ.get("SHOAL_TEST_PYXIS", "")
EXAMPLE = pytest.mark.skipif(bool(GIVEN), reason="SHOAL_TEST_PYXIS gives the real files")
REAL = pytest.mark.skipif(not GIVEN, reason="needs enroot.deb and spank_pyxis.so for this Slurm in SHOAL_TEST_PYXIS")
SECTION = "containers: {engine: pyxis, enroot: enroot.deb, plugin: spank_pyxis.so}\n"
SOURCE = Path(__file__).with_name("spank_example.c").read_text()
MAKE = r"""
set -e
cd "$(mktemp -d)"
printf %s "$1" > example.c
gcc -shared -fPIC -w -o /run/spank_pyxis.so example.c
mkdir -p enroot/DEBIAN enroot/usr/bin enroot/usr/share/enroot/hooks.d enroot/etc/enroot/hooks.d
printf '%s\n' 'Package: enroot' 'Version: 0.1' 'Architecture: all' 'Maintainer: nobody' 'Description: example' \
    > enroot/DEBIAN/control
printf '#!/bin/sh\necho example\n' > enroot/usr/bin/enroot
for hook in usr/share/enroot/hooks.d/50-slurm-pytorch.sh usr/share/enroot/hooks.d/50-slurm-pmi.sh \
    etc/enroot/hooks.d/98-nvidia.sh; do
    printf '#!/bin/sh\n' > enroot/$hook
    chmod 755 enroot/$hook
done
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
        if GIVEN:
            for name in ("spank_pyxis.so", "enroot.deb"):
                shutil.copy(Path(GIVEN, name), made.file.parent)
        else:
            made.install({"n1": "gcc libc6-dev libslurm-dev"})
            make_files(made)
        yield made


@EXAMPLE
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
    assert cluster.on("n1", "ls", HOOKS).split() == [*SLURM_HOOKS.split(), "51-shoal-pmix.sh", "98-nvidia.sh"]
    assert cluster.on("n1", "stat", "-c", "%a", NVIDIA_HOOK) == "644\n"
    assert cluster.json("up")["changed"] == []


@EXAMPLE
def test_node_that_was_started_again_has_its_directories(cluster: Cluster) -> None:
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: "IDLE" in cluster.states()["n1"] and cluster.answers("n1"))
    run = "srun --container-image=again sh -c 'echo $EXAMPLE_IMAGE; stat -c %a /run/enroot'"
    assert cluster.on("controller", "sh", "-c", run).split() == ["again", "1777"]


@REAL
def test_lines_of_users_of_pyxis_work_as_written(cluster: Cluster) -> None:
    cluster.file.write_text(cluster.file.read_text() + SECTION)
    cluster.json("up")
    shutil.copy(debian_layer(), shared(cluster) / "layer.tar")
    pack = "mkdir /run/root && tar -xf /shared/layer.tar -C /run/root --exclude='./dev/*' && chmod 755 /run/root"
    cluster.on(
        "n1", "sh", "-c", f"{pack} && mksquashfs /run/root /shared/mini.sqsh -quiet -comp zstd && rm -r /run/root"
    )
    image, name, grep = (
        "--container-image=/shared/mini.sqsh",
        "--container-name=pytorch-slurm",
        "grep PRETTY /etc/os-release",
    )
    assert "bookworm" in as_ann(cluster, f"srun {image} {name} {grep}")
    as_ann(cluster, f"srun {name} --container-writable sh -c 'echo kept > /opt/note'")  # another job: scope is global
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: "IDLE" in cluster.states()["n1"] and cluster.answers("n1"))
    assert as_ann(cluster, f"srun {name} cat /opt/note").splitlines()[-1] == "kept"
    as_ann(cluster, "mkdir -p /shared/ann && echo mounted > /shared/ann/file")
    mounts = "--container-mounts=/shared/ann:/workspace --container-workdir=/workspace"
    assert as_ann(cluster, f"srun {name} {mounts} cat file").splitlines()[-1] == "mounted"
    as_ann(cluster, "srun enroot create --name pyxis_byhand /shared/mini.sqsh")
    assert "bookworm" in as_ann(cluster, f"srun --container-name=byhand {grep}")
    script = shlex.quote(f"#!/bin/sh\n#SBATCH {image}\ngrep PRETTY /etc/os-release; id -u\n")
    submit = (
        f"cd /shared/ann && printf %s {script} > job.sh && sbatch --wait -o job.out job.sh > /dev/null && cat job.out"
    )
    batch = as_ann(cluster, submit)
    assert "bookworm" in batch and batch.splitlines()[-1] == "2001"


def as_ann(cluster: Cluster, command: str) -> str:
    return cluster.on("controller", "runuser", "-l", "ann", "-c", f"{command} 2>&1")


def test_removed_section_removes_the_plugin(cluster: Cluster) -> None:
    cluster.edit(SECTION, "")
    cluster.json("up")
    assert "container-image" not in cluster.on("controller", "srun", "--help")
    for host in ("controller", "n1"):
        assert cluster.on(host, "ls", PLUGIN, ENROOT, SETTINGS, PMIX_HOOK, status=None) == ""
    assert "spank_pyxis" not in cluster.on("controller", "sh", "-c", f"cat {PLUGSTACK} 2> /dev/null; true")
    assert cluster.on("controller", "srun", "hostname") == "n1\n"
    assert cluster.json("up")["changed"] == []
