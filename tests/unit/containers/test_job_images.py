"""`containers:` of the file, what `--image` and `--mount` accept, which nodes run an image, and what hosts get."""

import fcntl
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.specs import TWO_NODES
from tests.unit.containers.test_image_runner import ALLOWED
from tests.unit.jobs.job_clusters import NODES, PARTITIONS, SHIPPED, job

from shoal.agent.document import Command, Directory, File, Service
from shoal.agent.facts import Facts, FileFact
from shoal.containers.images import JobImage, StoredImage, is_reference, require_nodes
from shoal.errors import SpecError, UsageError
from shoal.jobs.resolve import resolve
from shoal.jobs.script import sbatch_script
from shoal.remote.runner.unpacked_image import IMAGES, LIMIT_FILE, PROGRAMS, RECORD
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.controller import controller
from shoal.roles.current_conf import OCI_CONF
from shoal.roles.documents import fact_files
from shoal.roles.images import APPARMOR_SWITCH, BUILD_PACKAGES, DEBIAN_SWITCH, LIMIT, REMOVE, SYSCTL, ImagesComponent
from shoal.roles.rented import rented_findings, rented_nodes
from shoal.slurm.conf import oci_conf, slurm_conf
from shoal.spec.loader import load_text
from shoal.spec.members import rented_members

REEF = TWO_NODES
NAMESPACES = {LIMIT: FileFact(text="7812\n")}
DEBIAN = StoredImage("debian", id="ab" * 32, architecture="arm64", layout="/shared/images/ab")


def cluster_of(more: str = "containers: oci\n", **files: dict[str, FileFact]) -> Cluster:
    addresses = {"c1": "10.0.0.1", "n1": "10.0.0.11", "n2": "10.0.0.12"}

    def facts(name: str) -> Facts:
        known = host_facts(name, addresses[name])
        return replace(known, arch="aarch64", files={**known.files, **NAMESPACES, **files.get(name, {})})

    return assemble(spec_of(REEF + more), {name: facts(name) for name in addresses}, addresses)


def test_nodes_know_the_limit_on_the_disk() -> None:
    for more, content in (("containers: {disk: 50G}\n", f"{50 << 30}\n"), ("containers: oci\n", None)):
        cluster = cluster_of(more)
        assert File(LIMIT_FILE, content) in ImagesComponent().documents(cluster, cluster.members[1])[Stage.BASE]
    with pytest.raises(SpecError, match="not a size"):
        load_text(REEF + "containers: {disk: 50}\n", "shoal.yaml")


def test_section_is_a_word_or_a_mapping() -> None:
    for text in ("containers: oci\n", "containers: {engine: oci}\n", "containers: {}\n"):
        section = load_text(REEF + text, "shoal.yaml").containers
        assert section is not None and section.engine == "oci"
    assert load_text(REEF, "shoal.yaml").containers is None
    with pytest.raises(SpecError, match="unknown engine"):
        load_text(REEF + "containers: docker\n", "shoal.yaml")


@cases("image", "debian", "debian:12", "host:5000/lab/mini:2", "a/b@sha256:" + "0" * 64, "/data/x")
def test_image_is_a_name_a_reference_or_a_path(image: str) -> None:
    assert job(image=image).image == image


@cases("image", "./x.tar", "../x", "~/x", "-v", "a b", "docker://x", "x;y", "/a/$HOME", "")
def test_other_images_are_rejected(image: str) -> None:
    with pytest.raises(SpecError, match=r"not an image|not a path on the hosts"):
        job(image=image)


@cases("mount", "data:/data", "/data", "/a:/b:rw", "/a:b", "/a:/b:ro:ro")
def test_mount_has_two_absolute_paths(mount: str) -> None:
    with pytest.raises(SpecError, match=f'not a mount, found "{mount}"'):
        job(image="debian", mount=[mount])


@cases("name", "../x", ".x", "x y", "x.lock", "x.new")
def test_container_has_a_name_that_no_other_file_of_the_node_has(name: str) -> None:
    assert job(image="debian", container_name="x.1").container_name == "x.1"
    with pytest.raises(SpecError, match="not a container's name"):
        job(image="debian", container_name=name)


@cases("mount", "/a:/", "/a://:ro", "/a:/b/..")
def test_mount_over_the_whole_image_is_rejected(mount: str) -> None:
    with pytest.raises(SpecError, match="a mount over the whole image"):
        job(image="debian", mount=[mount])


def test_options_of_images_need_one() -> None:
    with pytest.raises(UsageError, match="--mount is for jobs in images"):
        resolve(job(mount=["/a:/b"]), NODES, PARTITIONS)


def test_only_names_with_a_tag_or_a_registry_are_pulled() -> None:
    assert [is_reference(name) for name in ("debian", "debian:12", "lab/debian")] == [False, True, True]


def test_image_of_another_cpu_type_is_rejected_before_the_job_starts() -> None:
    amd64 = replace(DEBIAN, architecture="amd64")
    with pytest.raises(UsageError, match="image debian is for amd64, and the nodes are arm64"):
        require_nodes(amd64, [("lab", "images", "images-arm64")])
    with pytest.raises(UsageError, match="no node of the cluster runs jobs in images"):
        require_nodes(DEBIAN, [("lab",), ("imagesque",)])
    with pytest.raises(UsageError, match="with pyxis"):
        require_nodes(DEBIAN, [("lab", "pyxis")])
    require_nodes(DEBIAN, [("lab",), ("images", "images-arm64")])


def test_job_asks_slurm_for_nodes_that_run_its_image() -> None:
    image = JobImage(DEBIAN)
    assert image.constraint(None) == "images-arm64" and image.constraint("fast&lab") == "images-arm64&fast&lab"
    assert image.constraint("a|b") == "images-arm64&(a|b)"
    assert JobImage(StoredImage("mine"), "mine").constraint(None) == "images"


@cases("launcher", "srun", "torchrun", "spawn", "pmix", "mpirun", "python")
def test_script_starts_ranks_with_the_python_of_the_node(launcher: str) -> None:
    spec = job(image="debian", python="/opt/conda/bin/python", launcher=launcher, gpus_per_node=0, mount=["/d:/e:ro"])
    image = JobImage(DEBIAN, mounts=spec.mount, script=spec.script, keep=("X",))
    text = sbatch_script(resolve(spec, NODES, PARTITIONS), replace(SHIPPED, image=image, code_root="/var/code"))
    [line] = [line for line in text.splitlines() if line.startswith("export SHOAL_IMAGE=")]
    told = json.loads(line.partition("'")[2].rpartition("'")[0])
    assert told["binds"] == ["/var/lib/shoal/jobs/reef", "/var/code"]
    assert told["mounts"] == [["/d", "/e", True]] and told["keep"] == ["X"] and told["id"] == DEBIAN.id
    [start] = [line for line in text.splitlines() if " rank --rank-from" in line or " spawn --nproc" in line]
    assert start.split()[0] == "python3" and "/opt/conda/bin/python" in start


def test_hosts_get_packages_directory_and_features() -> None:
    cluster, component = cluster_of(), ImagesComponent()
    c1, n1, _ = cluster.members
    assert component.packages(cluster.spec, n1, None) == ("skopeo", "umoci", "crun", *BUILD_PACKAGES)
    assert component.packages(cluster.spec, c1, None) == ("skopeo", "umoci")
    documents = component.documents(cluster, n1)
    place, service, timer, running = documents[Stage.SERVICES]
    assert place == Directory(IMAGES, mode=0o1777) and running == Service("shoal-images.timer")
    assert timer.restarts == ("shoal-images.timer",)
    assert f"ExecStart=/usr/bin/env python3 -I -S {PROGRAMS}/start.py evict --\n" in str(service.content)
    assert "OnCalendar=daily\n" in str(timer.content)
    files = {item.path: item.content for item in documents[Stage.BASE] if isinstance(item, File)}
    assert f"{PROGRAMS}/start.py" in oci_conf() and f"{PROGRAMS}/start.py" in files
    imported = set(re.findall(r"^ *from \.(\w+) import", "".join(map(str, files.values())), re.MULTILINE))
    installed = {path.rpartition("/")[2].removesuffix(".py") for path in files}
    assert imported - installed == {"launch", "rank", "watch"}  # of `shoal run`, which brings its own
    assert component.documents(cluster, c1) == {}
    assert slurm_conf(cluster.conf).count("Feature=lab,images,images-arm64") >= 1
    assert File(OCI_CONF, oci_conf(), restarts=("slurmctld",), keep=True) in controller(cluster)
    assert component.findings(cluster) == ()


@cases(
    "files, words",
    ({LIMIT: FileFact(text="0\n")}, "user.max_user_namespaces is 0"),
    ({LIMIT: FileFact()}, "user.max_user_namespaces is 0"),
    ({DEBIAN_SWITCH: FileFact(text="0\n")}, "kernel.unprivileged_userns_clone is 0"),
    ({APPARMOR_SWITCH: FileFact(text="1\n")}, "kernel.apparmor_restrict_unprivileged_userns is 1"),
)
def test_host_without_user_namespaces_is_left_out_with_the_reason(files: dict[str, FileFact], words: str) -> None:
    cluster = cluster_of(n2=files)
    features = {node.name: node.features for node in cluster.conf.nodes}
    assert features == {"n1": ("lab", "images", "images-arm64"), "n2": ("lab",)}
    [finding] = ImagesComponent().findings(cluster)
    assert (finding.host, finding.level) == ("n2", "warning")
    assert words in str(finding) and "with sysctl" in finding.fix


@cases(
"offers, features, words",
("provider: lambda, type: gpu_1x_h100_pcie", "images,images-amd64", ""),
        ("provider: lambda, type: gpu_1x_gh200", "images,images-arm64", ""),
        ("offers: [{provider: lambda, type: gpu_1x_gh200}, {provider: lambda, type: gpu_1x_a10}]",
         "images,images-arm64,images-amd64", ""),
        ("provider: lambda, type: gpu_1x_new, cpus: 1, memory: 1G", "images,images-amd64,images-arm64",
         "the CPU type of its machines is not known, so jobs in images of any type may rent them"),
        ("provider: runpod, type: NVIDIA L4, cpus: 1, memory: 1G", "", "jobs in images do not run there"),)  # fmt: skip
def test_node_has_the_features_of_images_before_it_is_rented(offers: str, features: str, words: str) -> None:
    accounts = "providers: {lambda: {key: 'env:KEY'}, runpod: {key: 'env:KEY'}}\n"
    text = f"  burst: {{{offers}, max: 2}}\n{accounts}"
    spec = cluster_of(text + "containers: oci\n").spec
    assert {node.features for node in rented_nodes(spec)} == {("burst", *filter(None, features.split(",")))}
    found = [finding for finding in rented_findings(spec) if "images" in finding.what]
    assert [(one.level, one.path, one.what) for one in found] == (
        [("info", "nodesets.burst", f"nodeset `burst`: {words}")] if words else []
    )
    without = cluster_of(text).spec
    assert {node.features for node in rented_nodes(without)} == {("burst",)}
    assert not [finding for finding in rented_findings(without) if "images" in finding.what]


def test_rented_machine_allows_user_namespaces_before_slurmd_starts() -> None:
    rented = "  burst: {provider: lambda, type: gpu_1x_h100_pcie, max: 1}\nproviders: {lambda: {key: 'env:KEY'}}\n"
    cluster = cluster_of(rented + "containers: oci\n")
    ubuntu = {**NAMESPACES, APPARMOR_SWITCH: FileFact(text="1\n"), DEBIAN_SWITCH: FileFact(text="0\n")}
    [burst] = rented_members(cluster.spec)
    for files, settings in ((NAMESPACES, []), (ubuntu, [DEBIAN_SWITCH, APPARMOR_SWITCH])):
        cluster = replace(cluster, facts={**cluster.facts, "burst1": host_facts("burst1", "10.0.0.9", files=files)})
        base = ImagesComponent().documents(cluster, burst)[Stage.BASE]
        [*conf] = [item.content for item in base if isinstance(item, File) and item.path == SYSCTL]
        wanted = "kernel.unprivileged_userns_clone = 1\nkernel.apparmor_restrict_unprivileged_userns = 0\n"
        assert conf == ([wanted] if settings else [])
        commands = [item for item in base if isinstance(item, Command) and item.name.startswith("set kernel.")]
        assert [command.argv[-2] for command in commands] == settings


@pytest.mark.skipif(not ALLOWED, reason="needs user namespaces")
def test_setting_that_forbids_user_namespaces_is_changed_where_that_is_possible() -> None:
    rented = "  burst: {provider: lambda, type: gpu_1x_h100_pcie, max: 1}\nproviders: {lambda: {key: 'env:KEY'}}\n"
    cluster = cluster_of(rented + "containers: oci\n")
    facts = host_facts("burst1", "10.0.0.9", files={LIMIT: FileFact(text="0\n")})
    [burst] = rented_members(cluster.spec)
    base = ImagesComponent().documents(replace(cluster, facts={"burst1": facts}), burst)[Stage.BASE]
    [command] = [item for item in base if isinstance(item, Command) and item.name == "set user.max_user_namespaces"]
    # A user namespace has a limit of its own.
    script = f'echo 0 > {LIMIT}; unshare --user true 2> /dev/null && exit 9; "$@" && unshare --user --mount true'
    inside = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")
    subprocess.run((*inside, *command.argv), check=True)
    # Elsewhere the join goes on, and finds that out.
    argv = ["/proc/none" if word == LIMIT else word for word in command.argv]
    assert subprocess.run(argv, check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_removed_section_removes_everything() -> None:
    left = {"c1": {OCI_CONF: FileFact(text=oci_conf())}, "n1": {IMAGES: FileFact(there=True)}}
    cluster = cluster_of("", **left)
    assert File(OCI_CONF, restarts=("slurmctld",)) in controller(cluster)
    timer, *units, command = ImagesComponent().documents(cluster, cluster.members[1])[Stage.SERVICES]
    assert timer == Service("shoal-images.timer", enabled=False, running=False)
    assert units == [File(f"/etc/systemd/system/shoal-images.{kind}") for kind in ("timer", "service")]
    assert IMAGES in command.argv[-1] and "images" not in slurm_conf(cluster.conf)


def test_cluster_without_the_section_has_no_items() -> None:
    cluster, component = cluster_of(""), ImagesComponent()
    for member in cluster.members:
        assert component.documents(cluster, member) == {} and component.packages(cluster.spec, member, None) == ()
    assert not any(isinstance(item, File) and item.path == OCI_CONF for item in controller(cluster))
    assert LIMIT not in fact_files(cluster.spec)


def test_oci_conf_of_the_operator_stays() -> None:
    cluster = cluster_of("", c1={OCI_CONF: FileFact(text="RunTimeRun=mine\n")})
    assert not any(isinstance(item, File) and item.path == OCI_CONF for item in controller(cluster))


@pytest.mark.skipif(os.getuid() != 0, reason="it runs as the owners of directories")
def test_removal_keeps_what_a_job_runs_in_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.lock").touch()
    images = tmp_path / "images"
    for user in ("ann", "bob"):
        for name in ("id", "containers/mine"):
            (images / user / name / "rootfs").mkdir(parents=True)
            (images / user / f"{name}.lock").touch()
        (images / user).chmod(0o700)
    (images / "evil").symlink_to(outside)
    line = ["sh", "-c", REMOVE.replace(IMAGES, str(images))]
    with (images / "bob/id.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        subprocess.run(line, check=True)
    left = sorted(str(path.relative_to(images)) for path in images.rglob("*"))
    assert left == ["bob", "bob/containers", "bob/id", "bob/id.lock", "bob/id/rootfs"]
    subprocess.run(line, check=True)
    assert not images.exists() and (outside / "x.lock").exists()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.mark.skipif(os.getuid() != 0, reason="it runs as the owners of directories")
def test_removal_does_nothing_as_root_whatever_users_call_their_directories(open_path: Path) -> None:
    """`-` is another directory for `cd` and another file for `stat`: whose owner the removal would be."""
    images, outside = open_path / "images", open_path / "outside"
    for place in (images, outside):
        place.mkdir()
    (outside / "root.lock").touch()
    for name in ("-", "--x", "-rf", ".x", "..x", "a b", "moved"):
        (images / name / "id").mkdir(parents=True)
        (images / name / "id.lock").touch()
        # As root this would remove what is root's.
        (images / name / "id" / RECORD).write_text(str(outside / "root.lock"))
        for path in (images / name, *(images / name).rglob("*")):
            os.chown(path, *((0, 0) if name == "moved" else (12345, 12345)))
    (images / "moved").chmod(0o777)  # of root's, and anybody may move it here
    (images / "link").symlink_to(outside)
    line = ["sh", "-c", REMOVE.replace(IMAGES, str(images))]
    subprocess.run(line, check=True, cwd=outside)
    assert [path.name for path in images.iterdir()] == ["moved"]
    assert [path.name for path in outside.iterdir()] == ["root.lock"]
