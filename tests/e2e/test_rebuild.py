"""A cluster keeps its controller and the source of its Slurm until `shoal down`: others are rejected.

The commands of `docs/rebuild.md` build it again with its records. A service that comes back afterwards changes nothing.

Run it by hand (`-m matrix`): it takes minutes.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text
from tests.e2e.shoal_server import ROOTS_PROGRAM
from tests.e2e.simulated_clouds import Cloud, bill, ended, simulated, spent

from shoal.roles.elastic import SUPERSEDED, UNIT
from shoal.roles.slurm_tree import find_trees
from shoal.spec.member import Shape

COVERS = "verbs/rebuild plan/ownership cloud/service/leader roles/slurm_source roles/slurm_tree"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1500)]

HOSTS, NAME = "el-move", "el-moved"
CLOUD = Cloud("sandbox", "sk-e2e-0123456789abcdef")
KEPT = "/root/stale.tar"
STATE = "/etc/shoal/elastic /etc/systemd/system/shoal-elastic.service /var/lib/shoal/elastic /opt/shoal"
SAVED = "var/backups/shoal var/lib/shoal/elastic/ledger.db srv/data"


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
            "  burst: {provider: acme, type: cpu, max: 1, idle: 30m, cpus: 1, memory: 1G}\n"
            "storage: {/data: {path: /srv/data}}\n"
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


def documented_commands(step: int, **words: str) -> list[str]:
    """The commands of a step of `docs/rebuild.md`, for a cluster without MLflow."""
    text = (ROOT / "docs/rebuild.md").read_text().partition(f"## {step}. ")[2].partition("\n## ")[0]
    lines = [line for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE) if "mlflow" not in line]
    return [re.sub("|".join(words), lambda word: words[word[0]], line) for line in lines]


def run_as_typed(cluster: Cluster, lines: Sequence[str]) -> None:
    """Run lines in a shell, beside the file."""
    directory = cluster.file.parent
    program = directory / "bin/shoal"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(ROOTS_PROGRAM.line())} "$@"\n')
    program.chmod(0o755)
    env = {**cluster.env, "PATH": f"{program.parent}:{cluster.env['PATH']}"}
    for line in lines:
        answered = re.sub(r"^shoal (down|reap|restore \S+)", r"\g<0> --yes", line)
        done = subprocess.run(
            ["sh", "-c", answered], cwd=directory, env=env, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, f"{answered}\n{done.stdout}\n{done.stderr}"


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


def test_another_controller_is_rejected_with_the_job_the_machine_and_the_files(moving: Moving) -> None:
    job = moving.submit("c1", "sleep 3600")
    moving.cluster.wait("the job runs", lambda: moving.state("c1", job) == "RUNNING", seconds=400)
    moving.lent.shell("c1", "echo weights > /srv/data/model")
    moving.put("c2", "c1")
    for command in ("plan", "check", "up"):
        done = moving.cluster.shoal(command, status=1)
        rejected = " ".join((done.stdout + done.stderr).split())
        assert f"is the controller of cluster {NAME}, the file says c2" in rejected, rejected
        assert f"running: job {job} (root); rented: burst1 (acme " in rejected, rejected
        assert "c1 has the share /data, the accounting database" in rejected, rejected
    assert moving.state("c1", job) == "RUNNING"
    moving.put("c1", "c2")
    moving.lent.shell("c1", f"scancel {job}")


def test_documented_commands_build_it_again_with_its_spending_records_and_files(moving: Moving) -> None:
    waiting = moving.lent.shell("c1", "cd /tmp && sbatch --parsable --hold --wrap true").strip()
    moving.put("c2", "c1")
    with_old, with_new = printed_commands(moving.cluster.shoal("up", status=1).stderr)
    moving.put("c1", "c2")
    words = {"OLD": "c1", "NEW": "c2", "PATHS": SAVED}
    first = documented_commands(1, **words, NODES="burst1,c2")
    down, *third = documented_commands(3, **words, NODES="burst1")
    assert (with_old, with_new) == ([*first, down], third)
    run_as_typed(moving.cluster, first)
    assert moving.state("c1", waiting) == "CANCELLED"
    moving.lent.shell("c1", f"systemctl stop shoal-elastic; tar -cf {KEPT} {STATE}; systemctl start shoal-elastic")
    run_as_typed(moving.cluster, documented_commands(2, **words))
    assert ended(moving.url)
    before = spent(moving.cluster, ["burst"])
    assert before > 0
    records = moving.lent.shell("c1", "sacct -a -X -n -P -o jobid,state")
    run_as_typed(moving.cluster, [down])
    moving.lent.shell("c1", f"test ! -e {UNIT} && test ! -e /etc/shoal/elastic && test ! -e /etc/shoal/member.json")
    moving.put("c2", "c1")
    run_as_typed(moving.cluster, third)
    run_as_typed(moving.cluster, documented_commands(4, **words)[:-1])
    backups = [backup["name"] for backup in moving.cluster.json("restore")["backups"]]
    newest = next(name for name in backups if name.endswith("-move.sql.gz"))
    run_as_typed(moving.cluster, documented_commands(4, **words, NAME=newest)[-1:])
    assert moving.cluster.json("up")["unchanged"]
    assert spent(moving.cluster, ["burst"]) == before
    assert moving.lent.shell("c1", "cat /data/model") == "weights\n"
    sacct = "sacct -a -X -n -P -S 2020-01-01 -o jobid,state"
    assert {*records.split("\n")} <= {*moving.lent.shell("c2", sacct).split("\n")}
    job = moving.submit("c2", "sleep 3600")
    moving.cluster.wait("the new controller rents", lambda: moving.state("c2", job) == "RUNNING", seconds=400)


def test_former_controller_that_returns_changes_nothing_and_is_ended_by_the_printed_command(moving: Moving) -> None:
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
    rejected = moving.cluster.shoal("up", status=1).stderr
    assert f"c1: is the controller of a cluster {NAME} too, beside c2" in rejected, rejected
    assert "shoal down" not in rejected
    [command] = re.findall("`(systemctl .*?)`", rejected)
    moving.lent.shell("c1", command)
    assert moving.cluster.json("up")["whole"]
    moving.lent.shell("c1", f"test ! -e {UNIT}")
    assert [entry["id"] for entry in bill(moving.url)["machines"] if not entry["ended"]] == [machine]


needs_tree = pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm")


@contextmanager
def packaged_cluster(directory: Path, image: str) -> Iterator[tuple[Cluster, Lent]]:
    """A controller `c` and a node `n` with the Slurm of their distribution."""
    with lent_hosts("x-sources", dict.fromkeys("cn", Shape(memory_mb=1024, image=image)), "x-source") as lent:
        text = spec_text("x-source", lent, "c", ("n",)) + "accounting: true\nslurm: {from: packages}\n"
        cluster = Cluster(directory, text)
        try:
            assert cluster.json("up")["whole"]
            yield cluster, lent
        finally:
            cluster.shoal("down", "--force", "--yes", status=None)


def rejected_source(cluster: Cluster, old: str, new: str) -> tuple[list[str], list[str]]:
    """Write another source into the file, and put the old one back. Returns the commands that `up` prints."""
    cluster.edit(f"{{from: {old}}}", f"{{from: {new}}}")
    error = cluster.shoal("up", status=1).stderr
    assert f"has Slurm from {old}, the file says `slurm: {{from: {new}}}`" in error, error
    cluster.edit(f"{{from: {new}}}", f"{{from: {old}}}")
    return printed_commands(error)


def daemon_directories(lent: Lent) -> set[str]:
    """The directories that Slurm's daemons run from."""
    exe = "for pid in $(pgrep -x 'slurmd|slurmctld|slurmdbd'); do dirname $(readlink /proc/$pid/exe); done"
    return {path for host in "cn" for path in lent.shell(host, exe).split()}


@needs_tree
def test_slurm_changes_by_the_printed_commands_with_queue_and_records(tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, "debian13") as (cluster, lent):
        jobs = [lent.shell("c", "cd /tmp && sbatch --parsable --wait --mem=20M --wrap true").strip()]
        for old, new, place in (("packages", "shoal", f"{tree.prefix}/sbin"), ("shoal", "packages", "/usr/sbin")):
            (drain, *before), after = rejected_source(cluster, old, new)
            assert (drain, after[-1]) == ("shoal node drain n", "shoal node resume n")
            run_as_typed(cluster, [drain])
            # It waits while the cluster is down.
            jobs.append(lent.shell("c", "cd /tmp && sbatch --parsable --mem=20M --wrap 'srun hostname'").strip())
            run_as_typed(cluster, before)
            cluster.edit(f"{{from: {old}}}", f"{{from: {new}}}")
            run_as_typed(cluster, after)
            assert daemon_directories(lent) == {place}
            ended_jobs, sacct = {f"{job}|COMPLETED" for job in jobs}, "sacct -aXnP -S 2020-01-01 -o jobid,state"
            cluster.wait("jobs have ended", lambda: ended_jobs <= {*lent.shell("c", sacct).split()}, seconds=200)  # noqa: B023
            assert cluster.json("up")["unchanged"]
        assert lent.shell("n", "ls -d /opt/shoal/slurm-* 2>/dev/null", status=None) == ""


@needs_tree
def test_records_that_the_tree_cannot_read_stay_beside(tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, "debian12") as (cluster, lent):
        lent.shell("c", "cd /tmp && sbatch --wait --mem=20M --wrap true")
        before, (_, resume) = rejected_source(cluster, "packages", "shoal")
        run_as_typed(cluster, before)
        cluster.edit("{from: packages}", "{from: shoal}")
        output = cluster.shoal("up", status=1).stderr
        assert "cannot read what Slurm 22.05.8 wrote" in output and "--leave-records" in output
        assert cluster.json("up", "--leave-records")["whole"]
        run_as_typed(cluster, [resume])
        assert daemon_directories(lent) == {f"{tree.prefix}/sbin"}
        assert lent.shell("c", "srun --mem=20M hostname") == "n\n"
        kept = "SELECT COUNT(*) FROM slurm_acct_db_slurm_22_05.\\`x-source_job_table\\`"
        assert int(lent.shell("c", f'mariadb -N -e "{kept}"')) == 1
        assert lent.shell("c", "ls /var/lib/slurm/slurmctld.slurm-22.05") != ""
        assert cluster.json("up")["unchanged"]
