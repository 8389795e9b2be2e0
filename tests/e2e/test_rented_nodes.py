"""Rented nodes: a simulated cloud whose machines are sandbox hosts, and a cluster that rents from it.

The cloud runs beside the cluster on this machine, as with `shoal simulate`. It keeps its own bill.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster
from tests.e2e.image_files import HERE, OTHER
from tests.e2e.image_users import User, lines, write_image
from tests.e2e.simulated_clouds import (
    UNFINISHED,
    Cloud,
    apart,
    asleep,
    bill,
    ended,
    preempt,
    printed,
    renting,
    state,
    submit,
)

from shoal.contract import WARNINGS_VARIABLE

COVERS = (
    "cloud elastic roles/elastic roles/rented verbs/rentals verbs/simulate verbs/run_rented verbs/provider_accounts "
    "verbs/cost remote/power_request.py remote/rental_ledger.py remote/boot_machine.sh remote/watchdog.sh"
)
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

NAME = "el-rent"
BOTH = "burst[1-2]"
KEY = "sk-e2e-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
budget: {{per_hour: 5}}
nodesets:
  burst: {{provider: acme, type: gpu-2, max: 2, idle: 10s, cpus: 1, memory: 1G, gpus: 2}}
  spot: {{provider: acme, type: cpu, market: spot, max: 1, idle: 10s, cpus: 1, memory: 1G}}
  small: {{provider: acme, type: gpu, max: 1, idle: 10s, cpus: 2, memory: 1G}}
  enough: {{provider: acme, type: gpu, max: 1, idle: 10s, cpus: 1, memory: 1G}}
  poor: {{provider: acme, type: cpu, max: 2, idle: 10s, cpus: 1, memory: 1G, budget: {{per_hour: 0.06}}}}
files:
  /opt/site/note: {{source: note, hosts: [burst]}}
users:
  ann: {{uid: 2001}}
containers: oci
"""
CONFINED = f"""\
cluster: {NAME}-cg
controller: {{provider: sandbox, memory: 1G, cgroups: true}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
nodesets:
  burst: {{provider: acme, type: cpu, max: 1, idle: 10s, cpus: 1, memory: 1G}}
"""


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    place = tmp_path_factory.mktemp("rented")
    (place / "note").write_text("from the file\n")
    with renting(place, SPEC, Cloud("sandbox", KEY)) as (cluster, urls):
        yield cluster, urls["sandbox"]


def test_job_starts_two_rented_nodes_and_they_are_released(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    assert asleep(cluster)
    assert bill(url)["machines"] == []
    show = "srun sh -c 'hostname; cat /opt/site/note; echo $CUDA_VISIBLE_DEVICES'"
    job = submit(cluster, BOTH, show, "--gpus-per-node=2")
    cluster.wait("the job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=240)
    assert state(cluster, job) == "COMPLETED", printed(cluster, job)
    assert sorted(printed(cluster, job)) == sorted(["burst1", "burst2", *["0,1", "from", "the", "file"] * 2])
    assert len(bill(url)["machines"]) == 2
    cluster.wait("its nodes go", lambda: ended(url), seconds=240)


def test_ledger_agrees_with_the_bill_of_the_provider(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    cluster.wait("their end is known", lambda: cluster.json("cost")["machines"] == 0, seconds=120)
    assert apart(cluster, url, "burst") == ""


def test_job_on_a_preempted_spot_machine_is_warned_in_time(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    # The comment of `shoal run` says that the job saves, the variable that its batch script takes the signal.
    waits = f": {WARNINGS_VARIABLE}; trap 'echo saved; exit 0' USR1; echo up; while :; do sleep 0.2; done"
    job = submit(cluster, "spot1", waits, "--comment=shoal:0a/0b")
    cluster.wait("the job runs", lambda: printed(cluster, job) == ["up"], seconds=240)
    [machine] = [entry for entry in bill(url)["machines"] if not entry["ended"]]
    preempt(url, machine["id"])
    cluster.wait("the job saves", lambda: "saved" in printed(cluster, job), seconds=60)
    cluster.wait("its machine goes", lambda: ended(url), seconds=120)


def test_provider_keys_are_readable_only_by_root(rented: tuple[Cluster, str]) -> None:
    cluster, _ = rented
    assert cluster.on("controller", "grep", "-rl", KEY, "/etc/shoal/elastic")
    look = f"grep -rl {KEY} / --include=* --exclude-dir=proc --exclude-dir=sys 2>/dev/null"
    result = cluster.ssh("controller", f"runuser -u slurm -- sh -c '{look}'; runuser -u nobody -- sh -c '{look}'")
    assert result.stdout == ""
    report = cluster.on("controller", "sh", "-c", "journalctl -u shoal-elastic; cat /proc/[0-9]*/cmdline; true")
    assert "python" in report and KEY not in report


def test_released_nodes_return_to_power_saving_without_flags(rented: tuple[Cluster, str]) -> None:
    cluster, _ = rented  # the tests before this one used the time in which Slurm lets them rest
    cluster.wait("all nodes sleep", lambda: asleep(cluster), seconds=240)


@pytest.mark.matrix  # tests/unit/cloud/test_service_restart.py has every step of it
def test_service_killed_repeatedly_orders_nothing_twice_and_leaves_no_machine(
    rented: tuple[Cluster, str],
) -> None:
    cluster, url = rented
    assert asleep(cluster)
    before = len(bill(url)["machines"])
    job = submit(cluster, BOTH, "srun hostname")
    for _ in range(6):
        cluster.ssh("controller", "systemctl kill --signal=KILL shoal-elastic; sleep 1; systemctl start shoal-elastic")
    cluster.wait("the job ends", lambda: state(cluster, job) == "COMPLETED", seconds=300)
    cluster.wait("its nodes go", lambda: asleep(cluster), seconds=240)
    cluster.wait("its machines go", lambda: ended(url), seconds=60)
    assert len(bill(url)["machines"]) == before + 2


def waits_for(cluster: Cluster, job: str) -> str:
    """Why a job waits, as `shoal jobs` shows it."""
    [listed] = [entry for entry in cluster.json("jobs")["jobs"] if entry["record"]["id"] == job]
    return str(listed["record"]["waits_for"])


def test_machine_with_fewer_cpus_than_its_nodeset_is_explained_on_the_job(rented: tuple[Cluster, str]) -> None:
    cluster, _ = rented
    job = submit(cluster, "small1", "true")
    said = "it has 1 CPUs and nodeset small says 2 (set `cpus: 1`, `memory: 1024M` there, or rent a larger type)"
    cluster.wait("the job says why it waits", lambda: said in waits_for(cluster, job), seconds=60)
    assert any(said in why for why in cluster.json("status")["rented"]["waiting"].values())
    cluster.on("controller", "scancel", job)


def features(cluster: Cluster) -> list[str]:
    return cluster.on("controller", "sinfo", "-h", "-n", "enough1", "-o", "%b").strip().split(",")


def test_job_of_a_user_in_an_image_rents_a_machine(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented  # of the type that the last test rejects: that is for its nodeset alone
    write_image(cluster, "one")
    # The type of the machine is not known before it joins.
    assert sorted(features(cluster)) == ["enough", "images", "images-amd64", "images-arm64"]
    ann = User(cluster, "ann")
    ran = ann.run("-w enough1 --image /shared/one.tar --directory /shared/ann")
    assert [(words[4:7], words[8]) for words in lines(ran)] == [(["hello", "2001", "one"], "tree")]
    assert sorted(features(cluster)) == ["enough", "images", f"images-{HERE}"]
    cluster.wait("its machine goes", lambda: ended(url), seconds=60)


@pytest.mark.matrix  # Slurm starts a requeued job after two minutes
def test_node_refused_by_a_budget_gets_its_machine_when_another_ends(rented: tuple[Cluster, str]) -> None:
    cluster, _ = rented
    first = submit(cluster, "poor1", "sleep 3000")
    cluster.wait("the first runs", lambda: state(cluster, first) == "RUNNING", seconds=120)
    second = submit(cluster, "poor2", "true")
    refused = "the budget of nodeset poor of $0.06 an hour: $0.06 is in use"
    cluster.wait("the second says why it waits", lambda: refused in waits_for(cluster, second), seconds=60)
    cluster.on("controller", "scancel", first)
    cluster.wait("the second runs", lambda: state(cluster, second) == "COMPLETED", seconds=400)


def test_up_without_a_package_that_release_needs_changes_nothing(tmp_path: Path) -> None:
    key = {"client_email": "a@b.test", "private_key": "none", "token_uri": "https://b.test"}
    (tmp_path / "key.json").write_text(json.dumps(key))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['google.auth'] = None\n")
    text = f"""\
cluster: {NAME}-gcp
controller: {{provider: sandbox}}
providers:
  gcp: {{key: "file:{tmp_path}/key.json", project: p}}
nodesets:
  burst: {{provider: gcp, type: a2-highgpu-1g, zone: us-central1-a, max: 1}}
"""
    cluster = Cluster(tmp_path, text)
    cluster.env["PYTHONPATH"] = str(tmp_path)
    said = "machines of gcp could not be released from here: gcp needs the package google-auth, which is not installed"
    refused = cluster.shoal("up", status=1).stderr
    assert f"error: {said}; nothing was changed" in " ".join(refused.split())
    assert "pip install" in refused and "google-auth>=2.35" in refused and cluster.instances() == {}
    [finding] = [entry for entry in cluster.json("check", status=None)["findings"] if entry["what"] == said]
    assert finding["level"] == "error" and "google-auth>=2.35" in finding["fix"]


@ON_DEBIAN_12
@pytest.mark.matrix  # a cluster of its own
def test_machine_without_cgroups_is_explained_where_slurm_confines_jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with renting(tmp_path_factory.mktemp("confined"), CONFINED, Cloud("sandbox", KEY)) as (cluster, _):
        assert "proctrack/cgroup" in cluster.on("controller", "scontrol", "show", "config")
        job = submit(cluster, "burst1", "true")
        said = "Slurm confines jobs with cgroups here, and this machine has no writable cgroups"
        cluster.wait("the job says why it waits", lambda: said in waits_for(cluster, job), seconds=60)
        cluster.on("controller", "scancel", job)


def test_stockout_is_shown_on_the_job(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    faults = json.dumps([{"kind": "stockout", "times": -1}]).encode()
    ask = urllib.request.Request(f"{url}/_simulator/faults", faults, method="PUT")
    with urllib.request.urlopen(ask, timeout=30):
        pass
    job = submit(cluster, "burst1", "true")

    def comment() -> str:
        return cluster.on("controller", "squeue", "-h", "-j", job, "-O", "admin_comment:200").strip()

    cluster.wait("the job says why it waits", lambda: "out of gpu-2" in comment(), seconds=120)
    assert any("out of gpu-2" in why for why in cluster.json("status")["rented"]["waiting"].values())
    [listed] = [entry for entry in cluster.json("jobs")["jobs"] if entry["record"]["id"] == job]
    assert "out of gpu-2" in listed["record"]["waits_for"]
    cluster.on("controller", "scancel", job)
    with urllib.request.urlopen(urllib.request.Request(f"{url}/_simulator/faults", b"[]", method="PUT"), timeout=30):
        pass


def test_node_without_its_machine_has_all_features_again(rented: tuple[Cluster, str]) -> None:
    cluster, _ = rented
    cluster.wait("images of any type may rent it", lambda: f"images-{OTHER}" in features(cluster), seconds=60)


@ON_DEBIAN_12
def test_rental_that_cannot_join_is_rejected_before_a_host_is_made(tmp_path: Path) -> None:
    text = f"""\
cluster: {NAME}-none
controller: {{provider: sandbox}}
providers:
  lambda: {{url: "http://127.0.0.1:9", key: "env:LAMBDA_KEY"}}
nodesets:
  burst: {{provider: lambda, type: gpu_1x_a10, max: 1}}
"""
    cluster = Cluster(tmp_path, text)
    cluster.env["LAMBDA_KEY"] = KEY
    said = "its machines cannot join, found lambda rents Ubuntu 24.04 with Slurm 23.11.4, and the controller's 22.05.8"
    for verb in ("plan", "up"):
        refused = " ".join(cluster.shoal(verb, status=1).stderr.split())
        assert said in refused and "name another `image` there" in refused
    assert said in " ".join(cluster.shoal("check", status=1).stdout.split()) and cluster.instances() == {}
