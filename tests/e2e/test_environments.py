"""Environments for jobs, the tracking server and clocks, on real hosts.

MLflow takes minutes to install: a small program replaces it here, and `test_mlflow.py` tests the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT, commands
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster, kill
from tests.e2e.standing import INDEX, Standing
from tests.e2e.test_lab import Client
from tests.e2e.tracking_checks import (
    address,
    check_jobs_report,
    check_no_password_lies_about,
    check_nobody_outside_reaches_it,
    check_the_page_opens_through_ssh,
)
from tests.small_wheels import small_wheel, torch_like, uv_wheel

from shoal.environments.store import LOCAL_DIRECTORY
from shoal.local_files import cache_dir
from shoal.remote.environment_builder import MARK
from shoal.roles.clock import following_conf, serving_conf
from shoal.sandbox.layout import Layout

COVERS = (
    "environments verbs/env verbs/env_build verbs/env_user roles/environments roles/tracking roles/clock tracking "
    "remote/environment_builder.py remote/environment_files.py remote/environment_start.py "
    "remote/environment_store.sh remote/service_venv.sh"
)
GROUP = "reef"
pytestmark = pytest.mark.sandbox

SCRIPT = """\
import sys, time
import herring
print("uses", herring.VERSION, sys.prefix, flush=True)
time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)
"""


RANKS = 4
"""Of a job on both nodes, which have two GPUs each."""
REMOVED = {
    "controller": "/shared/environments /shared/index /shared/chrony.conf /shared/alice.out /shared/begun /shared/go"
    " /shared/shoal-jobs/alice/environments /tmp/chrony /tmp/chrony_*.deb /var/lib/shoal/environments",
    "fish1": "/var/lib/shoal/environments",
    "fish2": "/var/lib/shoal/environments '/opt/a copy'",
}
"""What the builds leave, and the tests."""


@pytest.fixture(scope="module")
def cluster(standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environments]:
    made = standing.view(Environments)
    made.tree = tmp_path_factory.mktemp("environments")
    made.env["SHOAL_FILE"] = str(made.file)
    (made.tree / "train.py").write_text(SCRIPT)
    place, index = made.file.parent, Layout(cache_dir(), made.name).shared / "index"
    files = {path: path.read_text() for path in place.glob("*.txt")}
    for name, version, needs in (("herring", "1.0", "sprat"), ("herring", "2.0", "sprat"), ("sprat", "1.0", "")):
        small_wheel(index, name, version, needs=needs)
    torch_like(index, "9.1+cu130", "13.0")
    uv_wheel(index)
    yield made
    for path, text in files.items():
        path.write_text(text)
    for host, paths in REMOVED.items():
        made.on(host, "sh", "-c", f"rm -rf {paths}")


class Environments(Cluster):
    """A cluster whose file names environments, and a directory with the script of the jobs."""

    tree: Path

    def requirements(self, name: str) -> Path:
        return self.file.with_name(f"{name}.txt")


@pytest.fixture(autouse=True)
def in_the_tree(cluster: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cluster.tree)


def printed(result: dict[str, object]) -> list[str]:
    lines = result["lines"]
    assert isinstance(lines, list)
    return [line["text"] for line in lines]


def test_job_with_an_unbuilt_environment_is_rejected(cluster: Cluster) -> None:
    output = cluster.shoal("run", "--env", "torch", "train.py", status=2).stderr
    assert "environment torch is not built yet" in output and "`shoal env build torch`" in output


def test_environment_is_built_once_and_runs_on_every_node(cluster: Cluster) -> None:
    [made] = cluster.json("env", "build", "torch")["made"]
    assert made["packages"] == ["herring==1.0", "sprat==1.0"]
    again = cluster.json("env", "build", "torch")
    assert again["fresh"] == [] and again["made"][0]["path"] == made["path"]
    done = cluster.json("run", "--wait", "-N2", "--env", "torch", "train.py")
    assert printed(done) == [f"uses 1.0 {made['path']}"] * RANKS
    assert cluster.on("fish2", f"{made['path']}/bin/herring-says") == "herring 1.0\n"
    # Its programs find the Python beside them, wherever a copy is.
    cluster.on("fish2", "cp", "-r", made["path"], "/opt/a copy")
    assert cluster.on("fish2", "/opt/a copy/bin/herring-says") == "herring 1.0\n"


def test_running_job_keeps_its_environment_during_a_rebuild(cluster: Environments) -> None:
    [old] = cluster.json("env", "build", "torch")["made"]
    job = cluster.json("run", "--env", "torch", "--gpus-per-node", "0", "train.py", "600")["id"]
    try:
        cluster.requirements("torch").write_text(INDEX + "herring==2.0\n")
        output = cluster.shoal("run", "--env", "torch", "train.py", status=2).stderr
        assert "environment torch was built from another version of its file" in output
        [new] = cluster.json("env", "build", "torch")["made"]
        assert new["id"] != old["id"]
        done = cluster.json("run", "--wait", "--env", "torch", "--gpus-per-node", "0", "train.py")
        assert printed(done) == [f"uses 2.0 {new['path']}"]
        cluster.on("controller", "touch", "-d", "2000-01-01", f"{old['path']}/{MARK}")
        assert cluster.json("env", "clean")["kept"] == {old["id"]: f"job {job} uses it"}
        cluster.on("controller", "test", "-e", f"{old['path']}/{MARK}")
    finally:
        cluster.shoal("cancel", job)
    gone = {"controller": [old["id"]]}
    cluster.wait("it goes when its job has ended", lambda: cluster.json("env", "clean")["removed"] == gone)
    cluster.on("controller", "test", "!", "-e", old["path"])
    cluster.on("fish1", f"{new['path']}/bin/herring-says")


def test_nodes_get_local_copies_and_a_node_without_a_copy_is_named(cluster: Cluster) -> None:
    built = cluster.json("env", "build", "bowl")
    [made] = built["made"]
    assert (made["path"], built["copied"]) == (f"{LOCAL_DIRECTORY}/{made['id']}", {"bowl": ["fish1", "fish2"]})
    done = cluster.json("run", "--wait", "-N2", "--env", "bowl", "train.py")
    assert printed(done) == [f"uses 1.0 {made['path']}"] * RANKS
    cluster.on("fish2", "rm", "-rf", made["path"])
    output = cluster.shoal("run", "-N2", "--env", "bowl", "train.py", status=3).stderr
    assert "fish2 cannot use environment bowl, so nothing was queued" in output
    # The archive is not where the node sees it: it comes through this machine.
    cluster.on("fish2", "mount", "-t", "tmpfs", "tmpfs", "/shared")
    try:
        assert cluster.json("env", "build", "bowl")["copied"] == {"bowl": ["fish2"]}
    finally:
        cluster.on("fish2", "umount", "/shared")
    assert cluster.on("fish2", f"{made['path']}/bin/herring-says") == "herring 1.0\n"


@pytest.fixture
def old_drivers(cluster: Cluster) -> Iterator[None]:
    for node in ("fish1", "fish2"):
        cluster.on(node, "sed", "-i.kept", "s/$/, 535.54.03/", "/etc/shoal-gpus")
    yield
    for node in ("fish1", "fish2"):
        cluster.on(node, "mv", "/etc/shoal-gpus.kept", "/etc/shoal-gpus")


@pytest.mark.usefixtures("old_drivers")
def test_torch_too_new_for_all_drivers_is_an_error_and_not_published(cluster: Cluster) -> None:
    built = cluster.json("env", "build", "sea", status=1)
    [finding] = built["findings"]
    assert finding["what"] == "environment sea: the driver is too old for torch 9.1+cu130, built for CUDA 13.0"
    assert (finding["level"], finding["found"], finding["host"]) == ("error", "driver 535.54.03", "fish[1-2]")
    states = {entry["name"]: entry["state"] for entry in cluster.json("env", "list")["environments"]}
    assert states["sea"] == "not built"
    cluster.on("fish1", "sed", "-i", "s/535.54.03/580.95.05/", "/etc/shoal-gpus")
    built = cluster.json("env", "build", "sea")
    assert [(finding["level"], finding["host"]) for finding in built["findings"]] == [("warning", "fish2")]


def test_next_build_finishes_a_killed_build(cluster: Environments) -> None:
    cluster.requirements("bowl").write_text(INDEX + "sprat\n")
    wheels = Layout(cache_dir(), cluster.name).shared / "environments" / "wheels"
    before = set(wheels.iterdir())
    process = cluster.background("env", "build", "bowl")
    cluster.wait("it has begun", lambda: set(wheels.iterdir()) != before or process.poll() is not None)
    kill(process)
    [made] = cluster.json("env", "build", "bowl")["made"]
    assert made["packages"] == ["sprat==1.0"]
    assert cluster.on("fish1", f"{made['path']}/bin/sprat-says") == "sprat 1.0\n"


def test_status_shows_clock_offsets_and_containers(cluster: Cluster) -> None:
    clocks = cluster.json("status")["clocks"]
    assert set(clocks["ahead"]) == {"fish1", "fish2"} and max(map(abs, clocks["ahead"].values())) < 60
    assert set(clocks["containers"]) == {"controller", "fish1", "fish2"}
    assert "clocks: " in cluster.shoal("status").stdout
    for host in ("controller", "fish1"):
        cluster.on(host, "sh", "-c", "! dpkg -s chrony 2> /dev/null | grep -q '^Status: install ok'")


UNPACK = "cd /tmp && apt-get -q download chrony > /dev/null 2>&1 && dpkg -x chrony_*.deb chrony"
READ = "/tmp/chrony/usr/sbin/chronyd -p -f /shared/chrony.conf"
"""chronyd reads a file and prints it (-p). It is never installed or started: the clock it would set is not its own."""


@ON_DEBIAN_12
def test_chronyd_accepts_the_configuration(cluster: Cluster) -> None:
    cluster.on("controller", "sh", "-c", UNPACK)
    for text in (serving_conf("10.0.0.1", ["10.0.0.1", "10.0.0.2", "fd00::2"]), following_conf("10.0.0.1")):
        (Layout(cache_dir(), cluster.name).shared / "chrony.conf").write_text(text)
        read = cluster.on("controller", *READ.split())
        assert read.splitlines() == [line for line in text.splitlines() if not line.startswith("#")]


def test_documented_commands_run(cluster: Cluster) -> None:
    block, _ = commands(ROOT / "docs/environments.md")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    output = {}
    for line in block:
        done = subprocess.run(
            ["bash", "-c", line], env={**cluster.env, "PATH": path}, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, f"{line}: {done.stdout}\n{done.stderr}"
        output[line] = done.stdout
    assert "torch: no changes" in output["shoal env build torch"]
    assert output["shoal run --env torch -N2 --wait train.py"].count("uses 2.0") == RANKS


@pytest.fixture(scope="module")
def alice(standing: Standing) -> Client:
    client = standing.client("alice", "environments")
    (client.tree / "train.py").write_text(SCRIPT)
    (client.tree / "requirements.txt").write_text(INDEX + "herring==1.0\n")
    assert set(client.json("join", "alice@desktop")["environments"]) == {"torch", "bowl", "sea"}
    return client


def test_user_uses_the_environments_of_the_cluster_and_cannot_take_their_names(cluster: Cluster, alice: Client) -> None:
    [made] = cluster.json("env", "build", "torch")["made"]
    version = made["packages"][0].removeprefix("herring==")
    done = alice.json("run", "--wait", "-N2", "--env", "torch", "train.py")
    assert printed(done) == [f"uses {version} {made['path']}"] * RANKS
    refused = alice.shoal("env", "build", "torch", "--requirements", "requirements.txt", status=2).stderr
    assert f"cluster {cluster.name} has an environment torch already" in refused
    assert "belongs to the cluster" in alice.shoal("env", "remove", "torch", status=2).stderr
    assert cluster.on("fish2", f"{made['link']}/bin/herring-says") == f"herring {version}\n"


def test_user_runs_the_documented_commands_about_an_environment_of_their_own(cluster: Cluster, alice: Client) -> None:
    _, block = commands(ROOT / "docs/environments.md")
    output = [alice.shoal(*shlex.split(line)[1:]).stdout for line in block]
    path = "/shared/shoal-jobs/alice/environments"
    assert f"mine: built; 2 packages, Python 3.11; {path}/mine" in output[0]
    assert output[1].count(f"uses 1.0 {path}/") == RANKS
    assert "the name is free again" in output[2] and "removed " in output[2]
    assert set(cluster.on("controller", "ls", path).split()) == {"archives", "names", "wheels"}


def test_plain_job_keeps_its_environment_while_its_owner_builds_another(cluster: Cluster, alice: Client) -> None:
    def build() -> dict[str, Any]:
        built = alice.shoal("env", "build", "mine", "--requirements", "requirements.txt", "--json").stdout
        return dict(json.loads(built)["made"][0])

    old = build()
    assert cluster.on("controller", "find", old["path"], "!", "-user", "alice") == ""
    late = (
        "import os, time, shoal.train\nopen('/shared/begun', 'w')\n"
        "while not os.path.exists('/shared/go'): time.sleep(0.2)\n"
        "import herring; print('late', herring.VERSION, shoal.train.__file__)"
    )
    wrapped = shlex.quote(f"{old['link']}/bin/python -c {shlex.quote(late)}")
    submit = f"sbatch --parsable --gres=none -o /shared/alice.out --wrap {wrapped}"
    job = cluster.ssh(
        "controller", f"cd / && setpriv --reuid=alice --regid=alice --init-groups {submit}"
    ).stdout.strip()
    shared = Layout(cache_dir(), cluster.name).shared
    cluster.wait("it runs", (shared / "begun").exists)
    (alice.tree / "requirements.txt").write_text(INDEX + "herring==2.0\n")
    new = build()
    assert new["link"] == old["link"] and new["path"] != old["path"]
    listed = json.loads(alice.shoal("env", "list", "--json").stdout)["environments"]
    assert {(entry["name"], entry["owner"], entry["path"]) for entry in listed if entry["made"]} >= {
        ("torch", "", "/shared/environments/torch"),
        ("mine", "alice", new["link"]),
    }
    done = alice.json("run", "--wait", "--gpus-per-node", "1", "--env", "mine", "train.py")
    assert printed(done) == [f"uses 2.0 {new['path']}"]
    removed = json.loads(alice.shoal("env", "remove", "mine", "--json").stdout)
    assert removed["kept"] == {entry["id"]: f"job {job} uses it" for entry in (old, new)}, removed
    (shared / "go").touch()
    library = f"{old['path']}/lib/python3.11/site-packages/shoal/train/__init__.py"
    cluster.wait("it has ended", lambda: f"late 1.0 {library}" in (shared / "alice.out").read_text())


def test_jobs_report_to_the_tracking_server_and_access_from_outside_fails(cluster: Environments) -> None:
    job = check_jobs_report(cluster, cluster.tree)
    check_nobody_outside_reaches_it(cluster)
    check_no_password_lies_about(cluster, "controller", job)
    check_the_page_opens_through_ssh(cluster)


def test_status_shows_the_health_of_the_tracking_server(cluster: Cluster) -> None:
    assert cluster.json("status")["tracking"]["well"]
    assert f"mlflow: {address(cluster)} responds" in cluster.shoal("status").stdout
    cluster.on("controller", "systemctl", "stop", "shoal-mlflow")
    health = cluster.json("status")["tracking"]
    assert not health["well"] and "refused" in health["said"]
    assert cluster.json("up")["changed"] == ["controller"]
    cluster.wait("it answers again", lambda: cluster.json("status")["tracking"]["well"])
