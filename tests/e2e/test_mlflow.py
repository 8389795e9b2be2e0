"""MLflow itself on sandbox hosts. Installing it takes minutes and hundreds of megabytes, so this is run by hand."""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import LIMIT, NOBODY, Cluster, running
from tests.e2e.test_lab import Client
from tests.e2e.tracking_checks import (
    check_jobs_report,
    check_no_password_lies_about,
    check_nobody_outside_reaches_it,
    check_the_page_opens_through_ssh,
)

COVERS = "tracking roles/tracking roles/tracking_logins train/tracking verbs/ui"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: en-mlflow-{database}
controller: {{provider: sandbox, compute: true}}
nodesets:
  fish: {{provider: sandbox, count: 2}}
users:
  alice: {{keys: ["file:alice.pub"]}}
  bob: {{keys: ["file:bob.pub"]}}
{more}
"""
MORE = {
    "sqlite": "tracking: mlflow\nstorage: {/data: {path: /shared/data}}",
    "postgresql": "tracking: {host: fish1, database: postgresql, artifacts: /shared/mlflow}",
}
FILES = {"sqlite": "/shared/data/shoal-mlflow", "postgresql": "/shared/mlflow"}
"""Where files of runs are: on the share that the server's host keeps, or in the directory that is named."""
TRAINS = """\
from shoal.train.tracking import tracker
with tracker({"lr": 0.1}) as run:
    for step in range(5):
        run.log({"loss": 1 / (step + 1)}, step)
"""
SENDS = """\
import base64, os, urllib.request
word = base64.b64encode("{MLFLOW_TRACKING_USERNAME}:{MLFLOW_TRACKING_PASSWORD}".format(**os.environ).encode()).decode()
def ask(method, data=None):
    address = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow-artifacts/artifacts/0/ab12/artifacts/model.txt"
    request = urllib.request.Request(address, data, {"Authorization": "Basic " + word}, method=method)
    return urllib.request.urlopen(request, timeout=120).read().decode()
ask("PUT", b"weights")
print(ask("GET"))
"""
REPORTS = """\
import mlflow
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.5)
print("reported", run.info.run_id, mlflow.get_experiment(run.info.experiment_id).name)
"""
CHANGES = """\
import sys
from mlflow import MlflowClient
client, run = MlflowClient(), sys.argv[1]
for change in (lambda: client.log_metric(run, "loss", 9.0), lambda: client.set_tag(run, "mine", "1"),
               lambda: client.delete_run(run)):
    try:
        change()
        print("changed")
    except Exception as error:
        print("refused", "403" in str(error) or "Permission denied" in str(error))
"""
COUNT = {
    "sqlite": "python3 -c \"import sqlite3; print(sqlite3.connect('/var/lib/shoal-mlflow/mlflow.db')"
    ".execute('select count(*) from metrics').fetchone()[0])\"",
    "postgresql": "cd / && runuser -u postgres -- psql mlflow -tAc 'select count(*) from metrics'",
}


@pytest.fixture(scope="module", params=[("sqlite", "controller"), ("postgresql", "fish1")], ids=lambda pair: pair[0])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, str, str]]:
    database, host = request.param
    place = tmp_path_factory.mktemp(database)
    for user in ("alice", "bob"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / user], check=True, timeout=60)
    text = SPEC.format(database=database, more=MORE[database]).replace("file:", f"file:{place}/")
    with running(place, text) as cluster:
        yield cluster, database, host


@pytest.fixture
def place(served: tuple[Cluster, str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(served[0].file.parent)
    return served[0].file.parent


def test_jobs_report_to_mlflow_and_access_from_outside_fails(served: tuple[Cluster, str, str], place: Path) -> None:
    cluster, _, host = served
    job = check_jobs_report(cluster, place)
    check_nobody_outside_reaches_it(cluster)
    check_no_password_lies_about(cluster, host, job)
    check_the_page_opens_through_ssh(cluster)


def test_training_metrics_are_stored_in_the_database(served: tuple[Cluster, str, str], place: Path) -> None:
    cluster, database, host = served
    (place / "trains.py").write_text(TRAINS)
    assert cluster.json("run", "--wait", "trains.py")["record"]["state"] == "COMPLETED"
    assert int(cluster.on(host, "sh", "-c", COUNT[database])) == 5


def test_artifacts_of_a_job_are_on_shared_storage(served: tuple[Cluster, str, str], place: Path) -> None:
    cluster, database, host = served
    (place / "sends.py").write_text(SENDS)
    done = cluster.json("run", "--wait", "sends.py")
    assert [line["text"] for line in done["lines"]] == ["weights"], done
    assert cluster.on(host, "cat", f"{FILES[database]}/0/ab12/artifacts/model.txt") == "weights"


def test_plain_sbatch_job_reports_as_its_user_and_others_cannot_change_the_run(
    served: tuple[Cluster, str, str], place: Path
) -> None:
    cluster, _, host = served
    python = cluster.on(host, "sh", "-c", "ls -d /opt/shoal/mlflow-*/bin/python").strip()

    def submit(user: str, program: str, *words: str) -> list[str]:
        """What a plain `sbatch` job of a user prints: no `shoal run`, and nothing said of MLflow."""
        address = cluster.instances()["controller"].address
        job = shlex.quote(shlex.join([python, "job.py", *words]))
        shell = (
            f"cd /shared/shoal-jobs/{user} && cat > job.py && sbatch -Q --wait -w {host} -o out --wrap {job}; cat out"
        )
        options = ("-q", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes")
        login = ["ssh", *options, "-i", str(place / user), f"{user}@{address}", shell]
        done = subprocess.run(login, input=program, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    [reported] = [line for line in submit("alice", REPORTS) if line.startswith("reported")]
    _, run, experiment = reported.split()
    assert experiment == "alice"
    assert submit("bob", CHANGES, run) == ["refused True"] * 3
    assert submit("alice", CHANGES, run) == ["changed"] * 3
    for user, other in (("alice", "bob"), ("bob", "alice")):
        login = cluster.ssh(host, f"runuser -u {user} -- cat /home/{other}/.mlflow/credentials")
        assert login.returncode != 0 and "Permission denied" in login.stderr


def test_printed_command_sends_the_records_of_an_ended_job_after_an_outage(
    served: tuple[Cluster, str, str], place: Path
) -> None:
    cluster, database, host = served
    before = int(cluster.on(host, "sh", "-c", COUNT[database]))
    with tempfile.TemporaryDirectory(prefix="shoal-mlflow-") as name:
        Path(name).chmod(0o755)
        key = Path(shutil.copy(place / "alice", Path(name, "key")))
        os.chown(key, NOBODY, NOBODY)
        alice = Client(cluster, Path(name), "alice", key)
        alice.json("join", "alice@desktop")
        for directory in (place, alice.tree):
            (directory / "trains.py").write_text(TRAINS)
        cluster.on(host, "systemctl", "stop", "shoal-mlflow")
        jobs = cluster.json("run", "--wait", "trains.py"), alice.json("run", "--wait", "trains.py")
        cluster.on(host, "systemctl", "start", "shoal-mlflow")
        cluster.wait("it answers", lambda: json.loads(cluster.shoal("status", "--json").stdout)["tracking"]["well"])
        address = cluster.instances()["controller"].address
        for user, job in zip(("root", "alice"), jobs, strict=True):
            [line] = [entry["text"] for entry in job["lines"] if "unsent records" in entry["text"]]
            command = line.partition(", on ")[2].partition(": ")[2]
            options = ("-q", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
            login = ["ssh", *options, "-i", str(place / user), f"{user}@{address}", command]
            done = (
                cluster.ssh("controller", command)
                if user == "root"
                else subprocess.run(login, capture_output=True, text=True, timeout=LIMIT)
            )
            assert done.returncode == 0 and "the server has all of" in done.stdout, f"{command}\n{done}"
    assert int(cluster.on(host, "sh", "-c", COUNT[database])) == before + 10


def test_mlflow_restarts_after_a_kill_and_after_a_reboot(served: tuple[Cluster, str, str], place: Path) -> None:
    cluster, _, host = served

    def well() -> bool:
        health = json.loads(cluster.shoal("status", "--json", status=None).stdout).get("tracking") or {}
        return bool(health.get("well"))

    cluster.on(host, "systemctl", "kill", "-s", "KILL", "shoal-mlflow")
    cluster.wait("it is back after a kill", well)
    cluster.fault("reboot", host)
    cluster.wait("it is back after a reboot", well)
    assert cluster.json("up")["whole"]
