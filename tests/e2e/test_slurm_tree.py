"""`slurm: {from: shoal}`: one Slurm on hosts of four Debian releases and in a container, used by an ordinary user."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, login_keys
from tests.e2e.existing_hosts import Lent, lent_hosts

from shoal.roles.slurm_tree import find_trees
from shoal.spec.member import Shape

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm"),
]

SPEC = """\
cluster: x-tree
controller: {{host: {ctl}, {login}}}
nodesets:
  lab: {{hosts: [{deb11}, {deb12}, {deb13}, {sid}], {login}}}
  pods: {{hosts: [{pod}], user: root, identity: {identity}}}
accounting: true
users:
  ann: {{keys: ["file:{keys}/ann.pub"]}}
files:
  /etc/slurm/job_submit.lua: {{source: submit.lua, hosts: [controller]}}
slurm: {{from: shoal, options: {{JobSubmitPlugins: lua}}}}
"""
SUBMIT_LUA = """\
function slurm_job_submit(job, part, uid)
    job.comment = "from lua"
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, part, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
SHAPES = {
    "ctl": Shape(memory_mb=1024),
    "deb11": Shape(memory_mb=512, image="debian11"),
    "deb12": Shape(memory_mb=512, gpus=1),
    "deb13": Shape(memory_mb=512, image="debian13"),
    "sid": Shape(memory_mb=512, image="sid"),
    "pod": Shape(memory_mb=512, container=True),
}
NODES = ["deb11", "deb12", "deb13", "sid"]


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    with lent_hosts("t-tree", SHAPES, "x-tree") as made:
        yield made


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with login_keys("ann") as place:
        yield place


@pytest.fixture(scope="module")
def cluster(lent: Lent, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    directory = tmp_path_factory.mktemp("tree")
    (directory / "submit.lua").write_text(SUBMIT_LUA)
    pod = lent.instances["pod"].target
    places = {name: lent.entry(name) for name in SHAPES}
    places["pod"] = f"{{name: pod, address: {pod.address}, port: {pod.port}}}"
    login = f"user: shoal, identity: {lent.identity}"  # an ordinary user with sudo
    made = Cluster(directory, SPEC.format(login=login, identity=lent.identity, keys=keys, **places))
    assert made.json("up")["whole"]
    return made


class Ann:
    """A user, who logs in to a host by SSH and has no other right."""

    def __init__(self, lent: Lent, keys: Path) -> None:
        self._lent, self._key = lent, keys / "ann"

    def run(self, command: str, host: str = "ctl") -> subprocess.CompletedProcess[str]:
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-i", str(self._key)]
        place = f"ann@{self._lent.instances[host].target.address}"
        return subprocess.run(
            ["ssh", "-q", *options, place, f"cd /tmp && {command}"], capture_output=True, text=True, timeout=300
        )


@pytest.fixture(scope="module")
def ann(cluster: Cluster, lent: Lent, keys: Path) -> Ann:
    return Ann(lent, keys)


def test_one_release_runs_on_all_hosts_without_munge_and_packages(cluster: Cluster, lent: Lent, ann: Ann) -> None:
    [version] = {tree.version.partition("-")[0] for tree in find_trees().values()}
    assert {node["version"] for node in cluster.json("status")["nodes"]} == {version}
    for host in ("ctl", *NODES):
        assert lent.shell(host, "dpkg -l 2>/dev/null | grep -E '^ii +(munge|slurm|sackd)'", status=1) == ""
        assert ann.run("srun --version", host).stdout.split()[1] == version  # not a login shell
    assert cluster.json("plan")["changes"] == []
    assert cluster.json("up")["unchanged"]


def test_ordinary_user_runs_jobs_on_all_and_sees_the_records(cluster: Cluster, ann: Ann) -> None:
    everywhere = ann.run("srun -N4 --mem=20M sh -c 'echo $(id -un) $(hostname)'")
    assert sorted(everywhere.stdout.splitlines()) == [f"ann {name}" for name in NODES], everywhere
    gpu = ann.run("srun -w deb12 --mem=20M --gpus=1 printenv CUDA_VISIBLE_DEVICES")
    assert gpu.stdout == "0\n", gpu
    batch = ann.run("sbatch --parsable --wait -N4 --mem=20M --output=/dev/null --wrap 'srun true'", "sid")
    job = batch.stdout.strip()
    assert batch.returncode == 0, batch
    cluster.wait("its record", lambda: "COMPLETED" in ann.run(f"sacct -X -n -P -j {job} -o state", "deb11").stdout)
    assert "Comment=from lua" in ann.run(f"scontrol show job {job}").stdout
    pmix = ann.run("srun -N4 --mem=20M --mpi=pmix sh -c 'echo $PMIX_RANK'")
    assert sorted(pmix.stdout.split()) == ["0", "1", "2", "3"], pmix


def test_container_runs_a_job_of_the_user(cluster: Cluster, ann: Ann) -> None:
    done = ann.run(
        "sbatch --wait -p pods --mem=20M --output=/tmp/ann-was-here --wrap 'srun sh -c \"id -un; hostname\"'"
    )
    assert done.returncode == 0, done
    assert cluster.on("pod", "cat", "/tmp/ann-was-here") == "ann\npod\n"


def test_restarted_slurmd_keeps_its_job(cluster: Cluster, lent: Lent, ann: Ann) -> None:
    wait = "while [ ! -e /tmp/word ]; do sleep 0.2; done"
    job = ann.run(f"sbatch --parsable -w deb11 --mem=20M --output=/dev/null --wrap '{wait}'").stdout.strip()
    state = f"sacct -X -n -P -j {job} -o state"
    cluster.wait("it runs", lambda: "RUNNING" in ann.run(state).stdout)
    lent.shell("deb11", "systemctl restart slurmd && touch /tmp/word")
    cluster.wait("it ends well", lambda: "COMPLETED" in ann.run(state).stdout)


def test_packages_in_place_of_the_tree_are_rejected_with_the_jobs(cluster: Cluster) -> None:
    text = cluster.file.read_text()
    cluster.edit("slurm: {from: shoal, ", "slurm: {")
    try:
        output = cluster.shoal("up", status=1).stderr
        assert "has Slurm from Shoal, not from packages (no job runs there)" in output
        assert "write `slurm: {from: shoal}` again" in output
        assert any("not from packages" in found["what"] for found in cluster.json("check", status=1)["findings"])
    finally:
        cluster.file.write_text(text)


def test_slurm_of_the_distribution_is_rejected_and_its_daemon_named(cluster: Cluster, lent: Lent) -> None:
    lent.shell("deb12", "install -m 755 /bin/true /usr/sbin/slurmd")
    try:
        output = cluster.shoal("plan", status=1).stderr
        assert "deb12: has another Slurm already (slurmd)" in output and "apt-get remove slurmd" in output
    finally:
        lent.shell("deb12", "rm /usr/sbin/slurmd")
