"""A cluster keeps its controller and the source of its Slurm until `shoal down`: others are rejected, and the printed
commands build it again with its records. A service that comes back afterwards changes nothing.

Run it by hand (`-m matrix`): it takes minutes.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text
from tests.e2e.simulated_clouds import Cloud, bill, ended, simulated, spent

from shoal.roles.elastic import SUPERSEDED
from shoal.roles.slurm_tree import find_trees
from shoal.spec.member import Shape

COVERS = "plan/rebuild verbs/former_controller plan/ownership cloud/service/leader roles/slurm_source roles/slurm_tree"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1500)]

HOSTS, NAME = "el-move", "el-moved"
CLOUD = Cloud("sandbox", "sk-e2e-0123456789abcdef")
KEPT = "/root/stale.tar"
STATE = "/etc/shoal/elastic /etc/systemd/system/shoal-elastic.service /var/lib/shoal/elastic /opt/shoal"


@dataclass
class Moving:
    """A cluster of two hosts, either of which may be its controller."""

    lent: Lent
    url: str
    cluster: Cluster

    def put(self, controller: str, other: str) -> None:
        """Name the controller in the file."""
        reach = f"user: shoal, identity: {self.lent.identity}"
        self.cluster.file.write_text(
            f"cluster: {NAME}\n"
            f"controller: {{host: {self.lent.entry(controller)}, {reach}}}\n"
            f'providers:\n  acme: {{kind: sandbox, url: "{self.url}", key: "env:SANDBOX_KEY"}}\n'
            "nodesets:\n"
            f"  lab: {{hosts: [{self.lent.entry(other)}], {reach}}}\n"
            "  burst: {provider: acme, type: cpu, max: 1, idle: 10s, cpus: 1, memory: 1G}\n"
            "accounting: true\n"
        )

    def submit(self, controller: str, command: str) -> str:
        return self.lent.shell(controller, f"cd /tmp && sbatch --parsable -w burst1 --wrap '{command}'").strip()

    def state(self, controller: str, job: str) -> str:
        return self.lent.shell(controller, f"squeue -h -t all -j {job} -o %T", status=None).strip()


def printed_commands(error: str) -> tuple[list[str], list[str]]:
    """The commands of the error: with the file as it was, and with the new one."""
    old, _, new = error.partition("then, with the new file:")
    before, after = (re.findall(r"^ +(shoal .*?)(?:   #.*)?$", text, re.MULTILINE) for text in (old, new))
    return before, after


def run_printed(cluster: Cluster, lines: list[str]) -> None:
    for line in lines:
        match = re.fullmatch(r"shoal (.*?)( [<>] \S+)?", line)
        assert match, line
        words = shlex.split(match[1])
        if "NAME" in words:
            names = [backup["name"] for backup in cluster.json("restore")["backups"]]
            newest = next(name for name in names if name.endswith("-move.sql.gz"))
            words = [*(newest if word == "NAME" else word for word in words), "--yes"]
        if words == ["down"]:
            words.append("--yes")
        command = shlex.join(cluster.line(*words)) + (match[2] or "")
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=cluster.file.parent,
            env=cluster.env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moving]:
    directory: Path = tmp_path_factory.mktemp("moving")
    with lent_hosts(HOSTS, dict.fromkeys(("c1", "c2"), Shape()), NAME) as lent, simulated(HOSTS, CLOUD) as url:
        made = Moving(lent, url, Cluster(directory, f"cluster: {NAME}\n"))
        made.cluster.env |= {CLOUD.variable: CLOUD.key}
        made.put("c1", "c2")
        try:
            assert made.cluster.json("up")["whole"]
            yield made
        finally:
            made.cluster.shoal("down", "--force", status=None)


def test_another_controller_is_rejected_with_the_job_and_the_machine(moving: Moving) -> None:
    job = moving.submit("c1", "sleep 3600")
    moving.cluster.wait("the job runs", lambda: moving.state("c1", job) == "RUNNING", seconds=400)
    moving.put("c2", "c1")
    for command in ("plan", "up"):
        rejected = moving.cluster.shoal(command, status=1).stderr
        assert f"c1: is the controller of cluster {NAME}, the file says c2" in rejected, rejected
        assert f"running: job {job} (root); rented: burst1 (acme " in rejected, rejected
    assert moving.state("c1", job) == "RUNNING"
    moving.put("c1", "c2")
    moving.lent.shell("c1", f"scancel {job}")
    moving.cluster.wait("its machine goes", lambda: ended(moving.url), seconds=300)
    moving.cluster.wait("its end is known", lambda: moving.cluster.json("cost")["machines"] == 0, seconds=120)


def test_printed_commands_build_it_again_with_its_spending_and_records(moving: Moving) -> None:
    before = spent(moving.cluster, ["burst"])
    assert before > 0
    records = moving.lent.shell("c1", "sacct -a -X -n -P -o jobid,state")
    moving.lent.shell("c1", f"systemctl stop shoal-elastic; tar -cf {KEPT} {STATE}; systemctl start shoal-elastic")
    moving.put("c2", "c1")
    with_old, with_new = printed_commands(moving.cluster.shoal("up", status=1).stderr)
    moving.put("c1", "c2")
    run_printed(moving.cluster, with_old)
    moving.lent.shell("c1", "test ! -e /etc/systemd/system/shoal-elastic.service && test ! -e /etc/shoal/elastic")
    moving.put("c2", "c1")
    run_printed(moving.cluster, with_new)
    assert moving.cluster.json("up")["whole"]
    assert spent(moving.cluster, ["burst"]) == before
    assert set(records.split()) <= set(
        moving.lent.shell("c2", "sacct -a -X -n -P -S 2020-01-01 -o jobid,state").split()
    )
    job = moving.submit("c2", "sleep 3600")
    moving.cluster.wait("the new controller rents", lambda: moving.state("c2", job) == "RUNNING", seconds=400)


def test_restarted_old_service_changes_nothing(moving: Moving) -> None:
    """As one would on a host that nobody reached, with all that it had."""
    [machine] = [entry["id"] for entry in bill(moving.url)["machines"] if not entry["ended"]]
    moving.lent.shell("c1", f"tar -xf {KEPT} -C / && systemctl daemon-reload && systemctl restart shoal-elastic")

    def problem() -> str:
        report = moving.lent.shell("c1", "cat /var/lib/shoal/elastic/status.json", status=None)
        return str(json.loads(report)["problem"]) if report else ""

    moving.cluster.wait("it sees who is in charge", lambda: "a later service" in problem(), seconds=120)
    assert f"{machine} of acme was rented by a later service" in problem()
    moving.lent.shell("c1", f"systemctl restart shoal-elastic && test -s {SUPERSEDED}")
    moving.cluster.wait("it says so again", lambda: "a later service" in problem(), seconds=60)
    assert [entry["id"] for entry in bill(moving.url)["machines"] if not entry["ended"]] == [machine]
    moving.lent.shell("c1", "systemctl stop shoal-elastic")


SLURM_HOSTS = "x-sources"
IMAGES = {"c13": "debian13", "n13": "debian13", "c12": "debian12", "n12": "debian12"}
needs_tree = pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm")


@pytest.fixture(scope="module")
def packaged() -> Iterator[Lent]:
    shapes = {name: Shape(memory_mb=1024, image=image) for name, image in IMAGES.items()}
    with lent_hosts(SLURM_HOSTS, shapes, "x-13", "x-12") as lent:
        yield lent


@contextmanager
def packaged_cluster(directory: Path, lent: Lent, release: str) -> Iterator[Cluster]:
    text = spec_text(f"x-{release}", lent, f"c{release}", (f"n{release}",))
    cluster = Cluster(directory, text + "accounting: true\nslurm: {from: packages}\n")
    try:
        assert cluster.json("up")["whole"]
        yield cluster
    finally:
        cluster.shoal("down", "--force", "--yes", status=None)


def daemon_directories(lent: Lent, release: str) -> set[str]:
    """The directories that Slurm's daemons run from."""
    exe = "for pid in $(pgrep -x 'slurmd|slurmctld|slurmdbd'); do readlink /proc/$pid/exe; done"
    paths = {path for host in (f"c{release}", f"n{release}") for path in lent.shell(host, exe).split()}
    return {path.rpartition("/")[0] for path in paths}


def rejected_source(cluster: Cluster, old: str, new: str) -> tuple[list[str], list[str]]:
    """Write another source into the file, and put the old one back. Returns the commands that `up` prints."""
    cluster.edit(f"slurm: {{from: {old}}}", f"slurm: {{from: {new}}}")
    error = cluster.shoal("up", status=1).stderr
    assert f"has Slurm from {old}, the file says `slurm: {{from: {new}}}`" in error, error
    cluster.edit(f"slurm: {{from: {new}}}", f"slurm: {{from: {old}}}")
    return printed_commands(error)


def wait_for_records(cluster: Cluster, lent: Lent, jobs: list[str]) -> None:
    """Also of jobs that waited while the cluster was down."""
    expected = {f"{job}|COMPLETED" for job in jobs}
    records = "sacct -a -X -n -P -S 2020-01-01 -o jobid,state"
    cluster.wait("the records are whole", lambda: expected <= {*lent.shell("c13", records).split()}, seconds=200)


@needs_tree
def test_slurm_changes_by_the_printed_commands_with_queue_and_records(packaged: Lent, tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, packaged, "13") as cluster:
        jobs = [packaged.shell("c13", "cd /tmp && sbatch --parsable --wait --mem=20M --wrap true").strip()]
        for old, new, directory in (
            ("packages", "shoal", f"{tree.prefix}/sbin"),
            ("shoal", "packages", "/usr/sbin"),
        ):
            before, after = rejected_source(cluster, old, new)
            assert before[0] == "shoal node drain n13" and after[-1] == "shoal node resume n13"
            run_printed(cluster, before[:1])
            waiting = packaged.shell("c13", "cd /tmp && sbatch --parsable --mem=20M --wrap 'srun hostname'").strip()
            run_printed(cluster, before[1:])
            cluster.edit(f"slurm: {{from: {old}}}", f"slurm: {{from: {new}}}")
            run_printed(cluster, after)
            assert daemon_directories(packaged, "13") == {directory}
            jobs.append(waiting)
            wait_for_records(cluster, packaged, jobs)
            assert cluster.json("up")["unchanged"]
        assert packaged.shell("n13", "ls -d /opt/shoal/slurm-* 2>/dev/null", status=None) == ""


@needs_tree
def test_records_that_the_tree_cannot_read_stay_beside(packaged: Lent, tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, packaged, "12") as cluster:
        packaged.shell("c12", "cd /tmp && sbatch --wait --mem=20M --wrap true")
        before, after = rejected_source(cluster, "packages", "shoal")
        run_printed(cluster, before)
        cluster.edit("slurm: {from: packages}", "slurm: {from: shoal}")
        output = cluster.shoal("up", status=1).stderr
        assert "cannot read what Slurm 22.05.8 wrote" in output and "--leave-records" in output
        assert cluster.json("up", "--leave-records")["whole"]
        run_printed(cluster, [line for line in after if "resume" in line])
        assert daemon_directories(packaged, "12") == {f"{tree.prefix}/sbin"}
        assert packaged.shell("c12", "srun --mem=20M hostname") == "n12\n"
        kept = "SELECT COUNT(*) FROM slurm_acct_db_slurm_22_05.\\`x-12_job_table\\`"
        assert int(packaged.shell("c12", f'mariadb -N -e "{kept}"')) == 1
        assert packaged.shell("c12", "ls /var/lib/slurm/slurmctld.slurm-22.05") != ""
        assert cluster.json("up")["unchanged"]
