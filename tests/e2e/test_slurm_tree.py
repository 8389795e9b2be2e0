"""`slurm: {from: shoal}`: one Slurm on hosts of four Debian releases and in a container, used by an ordinary user."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, login_keys
from tests.e2e.existing_hosts import Lent, lent_hosts
from tests.slurm_builds import next_build

from shoal.roles.slurm_tree import find_trees
from shoal.spec.member import Shape

COVERS = (
    "roles/slurm_tree roles/slurm_source remote/slurm_tree.sh remote/slurm_programs.sh remote/slurm_mask.sh "
    "scripts/build-slurm scripts/slurm_wheel.py"
)
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


def test_cluster_keeps_its_slurm(cluster: Cluster) -> None:
    text = cluster.file.read_text()
    cluster.edit("slurm: {from: shoal, ", "slurm: {")
    try:
        output = cluster.shoal("up", status=1).stderr
        assert "ctl: has Slurm from shoal, the file says `slurm: {from: packages}`" in output, output
        assert "nothing was changed" in output and "shoal node resume deb[11-13]" in output, output
    finally:
        cluster.file.write_text(text)


def test_system_without_wireguard_is_rejected(cluster: Cluster) -> None:
    text = cluster.file.read_text()
    cluster.edit("cluster: x-tree\n", "cluster: x-tree\nnetwork: wireguard\n")
    try:
        reason = "deb11: WireGuard cannot run (the kernel has none, and debian 11 has no package wireguard-go)"
        assert f"{reason}\nnothing was changed" in cluster.shoal("up", status=1).stderr
        errors = [one for one in cluster.json("check", status=1)["findings"] if one["level"] == "error"]
        assert {(one["host"], one["what"]) for one in errors} == {("deb11", "WireGuard cannot run")}
    finally:
        cluster.file.write_text(text)


@pytest.mark.matrix  # ten seconds
def test_daemon_of_the_distribution_without_a_task_is_masked(cluster: Cluster, lent: Lent) -> None:
    unit = "[Service]\\nExecStart=/usr/sbin/slurmdbd\\n[Install]\\nWantedBy=multi-user.target\\n"
    lent.shell("deb12", "printf '#!/bin/sh\\nexec sleep 1000\\n' >/usr/sbin/slurmdbd && chmod 755 /usr/sbin/slurmdbd")
    lent.shell("deb12", f"printf '{unit}' >/usr/lib/systemd/system/slurmdbd.service && systemctl enable --now slurmdbd")
    assert "mask the distribution's slurmdbd" in cluster.shoal("plan").stdout
    assert cluster.json("up")["whole"]
    state = "systemctl show -p LoadState -p ActiveState --value slurmdbd | xargs"
    assert lent.shell("deb12", state) == "masked inactive\n"
    assert cluster.json("up")["unchanged"]
    lent.shell("deb12", "rm /usr/sbin/slurmdbd")


def test_newer_build_takes_over_under_running_jobs_and_gives_back(
    cluster: Cluster, lent: Lent, ann: Ann, tmp_path: Path
) -> None:
    [tree] = find_trees().values()
    new = next_build(tree, tmp_path)
    job = ann.run(f"sbatch --parsable -w deb11 --mem=20M --output=/dev/null --wrap '{WAIT}'").stdout.strip()
    state = f"sacct -X -n -P -j {job} -o state"
    cluster.wait("it runs", lambda: "RUNNING" in ann.run(state).stdout)
    records = ann.run("sacct -X -n -P -o jobid").stdout
    before, cluster.env = cluster.env, {**cluster.env, "SHOAL_CACHE": str(tmp_path)}
    try:
        assert {change["cost"] for change in cluster.json("plan")["changes"]} <= {"nothing", "restart"}
        assert cluster.json("up")["whole"]
        assert running_trees(lent) == {new}
        # One kernel, one clock: slurmdbd first, nodes last.
        assert (started := start_times(lent)) == sorted(started), started
        assert lent.shell("deb11", "ls -d /opt/shoal/slurm-*").split() == sorted([tree.prefix, new])  # the job's
        assert lent.shell("sid", "ls -d /opt/shoal/slurm-*").split() == [new]
        assert cluster.json("up")["unchanged"]
        assert "RUNNING" in ann.run(state).stdout
        assert ann.run("srun -N4 --mem=20M true").returncode == 0
        lent.shell("deb11", "touch /tmp/go")
        cluster.wait("it ends well", lambda: "COMPLETED" in ann.run(state).stdout)
        assert set(records.split()) <= set(ann.run("sacct -X -n -P -o jobid").stdout.split())
        # A tree stays while a step runs from it, and steps end after their job.
        steps = "pgrep -f '^slurmstepd: \\['"
        cluster.wait("steps end", lambda: not any(lent.shell(host, steps, status=None) for host in NODES))
    finally:
        cluster.env = before
    assert cluster.json("up")["whole"]  # and back
    assert running_trees(lent) == {tree.prefix}
    for host in NODES:
        assert lent.shell(host, "ls -d /opt/shoal/slurm-*").split() == [tree.prefix]
    assert ann.run("srun -N4 --mem=20M true").returncode == 0
    assert cluster.json("up")["unchanged"]


WAIT = "while [ ! -e /tmp/go ]; do sleep 0.2; done"


def running_trees(lent: Lent) -> set[str]:
    """The trees that Slurm's daemons run from."""
    exe = r"for pid in $(pgrep -x 'slurmd|slurmctld|slurmdbd'); do readlink /proc/$pid/exe; done"
    paths = {path for host in SHAPES if host != "pod" for path in lent.shell(host, exe).split()}
    return {path.rpartition("/sbin/")[0] for path in paths}


def start_times(lent: Lent) -> list[int]:
    """When the daemons started: slurmdbd, slurmctld, slurmd."""
    hosts = {"slurmdbd": ["ctl"], "slurmctld": ["ctl"], "slurmd": NODES}
    show = "systemctl show -p ExecMainStartTimestampMonotonic --value {}"
    return [int(lent.shell(host, show.format(name))) for name, names in hosts.items() for host in names[:1]]
