"""Upgrade a cluster that an earlier version made, with a live rental and running jobs.

The earlier version comes from the repository's own history, and runs with the packages of this one. No release is out
that users could upgrade from: until one is, this runs by hand.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster
from tests.e2e.simulated_clouds import UNFINISHED, Cloud, bill, ended, printed, renting, state, submit

EARLIER = "f0a23056"
"""A commit of which this version reads all that it left: the one before migrations of earlier states went."""
ROOT = Path(__file__).parents[2]
AVAILABLE = subprocess.run(["git", "cat-file", "-e", EARLIER], cwd=ROOT, capture_output=True).returncode == 0

COVERS = "spec roles cloud/service remote"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    ON_DEBIAN_12,
    pytest.mark.skipif(not AVAILABLE, reason=f"needs commit {EARLIER[:8]} in the clone: git fetch --unshallow"),
]

NAME = "up-grade"
KEY = "sk-upgrade-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
budget: {{per_hour: 5}}
accounting: true
users:
  ada: {{uid: 2001}}
nodesets:
  lab: {{provider: sandbox, count: 1, memory: 1G}}
  burst: {{provider: acme, type: cpu, max: 2, idle: 10s, cpus: 1, memory: 1G}}
"""
WAITS = "srun bash -c 'echo up; until [ -e /shared/go ]; do sleep 0.2; done; echo done'"


class EarlierCluster(Cluster):
    """The same file under the earlier version's command line, until `upgraded` is set."""

    upgraded = False

    def line(self, *arguments: str) -> list[str]:
        line = super().line(*arguments)
        return line if self.upgraded else [sys.executable, "-c", START, str(self.file.parent / "earlier"), *line[3:]]

    def begin(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        if self.upgraded:
            return super().begin(*arguments, **options)
        return subprocess.Popen(self.line(*arguments), text=True, env=self.env, **options)


START = """\
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "shoal"
runpy.run_module("shoal", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EarlierCluster, str]]:
    directory = tmp_path_factory.mktemp("upgrade")
    archive = subprocess.run(["git", "archive", EARLIER, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    earlier = directory / "earlier"
    earlier.mkdir()
    subprocess.run(["tar", "-x", "-C", earlier, "--strip-components=1"], input=archive, check=True)
    with renting(directory, SPEC, Cloud("sandbox", KEY), kind=EarlierCluster) as (made, urls):
        assert isinstance(made, EarlierCluster)
        yield made, urls["sandbox"]


def test_running_cluster_upgrades_without_loss(cluster: tuple[EarlierCluster, str], tmp_path: Path) -> None:
    made, url = cluster
    jobs = {node: submit(made, node, WAITS) for node in ("lab1", "burst1")}
    for node, job in jobs.items():
        made.wait(f"the job on {node} runs", lambda job=job: printed(made, job) == ["up"], seconds=240)  # type: ignore[misc]
    ledger = _ledger(made)
    assert len(ledger) == 1
    trained = run_script(made, tmp_path)

    made.upgraded = True
    assert made.json("plan")["loses"] == []
    assert made.json("up")["whole"]
    # The rental service, which `up` restarts, gives the rented host what is new, and all others its key.
    made.wait("the others have the key", lambda: _known_hosts(made, "lab1", "burst1") != [], seconds=120)
    assert _known_hosts(made, "lab1", "burst1") == _known_hosts(made, "controller", "burst1")
    assert made.json("up")["unchanged"]
    assert _ledger(made) == ledger, "the rental that was alive still is, and no other"
    assert [machine["ended"] for machine in bill(url)["machines"]] == [None]
    assert {state(made, job) for job in jobs.values()} == {"RUNNING"}

    made.on("controller", "touch", "/shared/go")
    for job in jobs.values():
        made.wait("the job ends", lambda job=job: state(made, job) not in UNFINISHED, seconds=120)  # type: ignore[misc]
        assert (state(made, job), printed(made, job)) == ("COMPLETED", ["up", "done"])
    made.wait("the job of `shoal run` ends", lambda: state(made, trained) not in UNFINISHED, seconds=120)
    assert [line["text"] for line in made.json("logs", trained)["lines"] if line["rank"] == 0] == ["up", "done"]
    later = run_script(made, tmp_path)
    made.wait("the next one ends", lambda: state(made, later) not in UNFINISHED, seconds=120)
    made.wait("the rented machine is released", lambda: ended(url), seconds=240)
    listed = {job["record"]["id"] for job in made.json("jobs", "--all")["jobs"]}
    assert set(jobs.values()) <= listed, "jobs of the earlier version are known"


def test_upgraded_cluster_rents_a_new_node(cluster: tuple[EarlierCluster, str]) -> None:
    made, _ = cluster
    job = submit(made, "burst2", "srun hostname")
    made.wait("the job ends", lambda: state(made, job) not in UNFINISHED, seconds=240)
    assert (state(made, job), printed(made, job)) == ("COMPLETED", ["burst2"])


def run_script(cluster: Cluster, tree: Path) -> str:
    """The number of a job of `shoal run` that prints, waits for the test, and prints again."""
    waits = "while not pathlib.Path('/shared/go').exists():\n    time.sleep(0.2)\n"
    (tree / "wait.py").write_text(f"import pathlib, time\nprint('up', flush=True)\n{waits}print('done')\n")
    begun = cluster.background("run", "--json", "--nodelist", "lab1", "wait.py", cwd=tree, stderr=subprocess.PIPE)
    out, errors = begun.communicate(timeout=LIMIT)
    assert begun.returncode == 0, errors
    return str(json.loads(out)["id"])


def _known_hosts(cluster: Cluster, host: str, node: str) -> list[str]:
    """The host keys of a node that a host has."""
    lines = cluster.on(host, "sh", "-c", "cat /etc/ssh/ssh_known_hosts || true").splitlines()
    return [line for line in lines if line.startswith(f"{node},")]


def _ledger(cluster: Cluster) -> list[str]:
    """The live rentals, each with the provider's id of its machine."""
    ask = "import sqlite3; print(*sqlite3.connect('/var/lib/shoal/elastic/ledger.db').execute(QUERY), sep='\\n')"
    query = "select id, node, state from rentals where gone_at is null order by id"
    return cluster.on("controller", "python3", "-c", ask.replace("QUERY", repr(query))).splitlines()
