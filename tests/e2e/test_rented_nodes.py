"""Rented nodes: simulated clouds whose machines and containers are sandbox hosts, and a cluster that rents from them.

The clouds run beside the cluster on this machine, as with `shoal simulate`. Each keeps its own bill. A container has no
share and no home: the files of `shoal run` reach it through the controller, and the files that jobs write are copied
back while they run. The tests share the cluster and run in this order: a container joins first, which must not keep a
machine from joining after it.
"""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster, login_keys
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
from tests.small_wheels import small_wheel, uv_wheel

from shoal.contract import WARNINGS_VARIABLE
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

COVERS = (
    "cloud elastic roles/elastic roles/rented verbs/rentals verbs/simulate verbs/run_rented verbs/provider_accounts "
    "verbs/cost remote/power_request.py remote/rental_ledger.py remote/boot_machine.sh remote/watchdog.sh"
)
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

NAME = "el-rent"
BOTH = "burst[1-2]"
KEY, POD_KEY = "sk-e2e-0123456789abcdef", "rp-e2e-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
network: wireguard
controller: {{provider: sandbox, memory: 1G}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
  runpod: {{url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}}
budget: {{per_hour: 9}}
nodesets:
  burst: {{provider: acme, type: gpu-2, max: 2, idle: 10s, cpus: 1, memory: 1G, gpus: 2}}
  spot: {{provider: acme, type: cpu, market: spot, max: 1, idle: 10s, cpus: 1, memory: 1G}}
  small: {{provider: acme, type: gpu, max: 1, idle: 10s, cpus: 2, memory: 1G}}
  enough: {{provider: acme, type: gpu, max: 1, idle: 10s, cpus: 1, memory: 1G}}
  poor: {{provider: acme, type: cpu, max: 2, idle: 10s, cpus: 1, memory: 1G, budget: {{per_hour: 0.06}}}}
  pods: {{provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 2, cpus: 1, memory: 2G, gpus: 1, idle: 10s}}
  large: {{provider: runpod, type: 8x NVIDIA A40, region: EU-RO-1, max: 1, cpus: 72, memory: 2G, gpus: 8, idle: 10s}}
environments:
  bowl: {{requirements: bowl.txt, place: local}}
files:
  /opt/site/note: {{source: note, hosts: [burst, pods]}}
users:
  ann: {{uid: 2001, keys: ["file:KEYS/ann.pub"]}}
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


SCRIPT = """\
import contextlib, json, os, sys, time
from pathlib import Path

job, node, gpu = Path(os.environ["SHOAL_JOB_DIR"]), os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]
with contextlib.suppress(ImportError):
    import herring
    print("uses", herring.VERSION, sys.prefix)
print(f"on {node} with gpu {gpu}")
print(Path("/opt/site/note").read_text().strip())
for step in range(int(sys.argv[1])):
    checkpoint = job / f"checkpoints/step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text(str(step))
    (job / "progress.new").write_text(json.dumps({"step": step, "updated": time.time()}))
    (job / "progress.new").rename(job / "progress.json")
    print("step", step)
    time.sleep(float(sys.argv[2]))
Path("result.txt").write_text("42")
if "fail" in sys.argv:
    raise ValueError("no such luck")
"""
JOBS = f"/var/lib/shoal/jobs/{NAME}"
PUBLIC = "/etc/ssh/ssh_host_ed25519_key.pub"


class Pods:
    """The cluster, the address of its cloud, and a working tree with the script."""

    def __init__(self, cluster: Cluster, url: str, tree: Path, key: Path) -> None:
        self.cluster, self.url, self.tree, self.key = cluster, url, tree, key
        (tree / "train.py").write_text(SCRIPT)

    def run(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """Queue a job of `shoal run` for the first container."""
        with chdir(self.tree):
            return str(self.cluster.json("run", *options, "-p", "pods", "-w", "pods1", "train.py", *arguments)["id"])

    def shown(self, job: str) -> dict[str, Any]:
        """The job as `shoal jobs` shows it."""
        [match] = [entry for entry in self.cluster.json("jobs")["jobs"] if entry["record"]["id"] == job]
        return dict(match)

    def kept(self, path: str) -> str:
        """A file of a job, where it is kept."""
        return self.cluster.on("controller", "cat", f"{JOBS}/{path}")


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, str], Path]]:
    """The cluster, the addresses of its clouds by kind, and a directory with the user's key."""
    place = tmp_path_factory.mktemp("rented")
    (place / "note").write_text("from the file\n")
    (place / "bowl.txt").write_text("--no-index\n--find-links /shared/index\nherring\n")
    both = Cloud("sandbox", KEY), Cloud("runpod", POD_KEY, ("--boot-seconds", "1"))
    with login_keys("ann") as keys, renting(place, SPEC.replace("KEYS", str(keys)), *both) as (cluster, urls):
        index = Layout(cache_dir(), NAME).shared / "index"
        small_wheel(index, "herring", "1.0")
        uv_wheel(index)
        yield cluster, urls, keys


@pytest.fixture(scope="module")
def rented(clouds: tuple[Cluster, dict[str, str], Path]) -> tuple[Cluster, str]:
    """The cluster, and the address of the cloud with machines."""
    return clouds[0], clouds[1]["sandbox"]


@pytest.fixture(scope="module")
def pods(clouds: tuple[Cluster, dict[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pods:
    cluster, urls, keys = clouds
    return Pods(cluster, urls["runpod"], tmp_path_factory.mktemp("tree"), keys / "ann")


# ---- containers


def test_job_starts_a_container_with_its_environment_and_its_files_return(pods: Pods) -> None:
    conf = pods.cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    assert "PartitionName=pods Nodes=pods[1-2] " in conf and " MaxNodes=1 " in conf
    [made] = pods.cluster.json("env", "build", "bowl")["made"]
    job = pods.run("3", "0.2", options=("--env", "bowl"))
    shown = pods.cluster.shoal("logs", "-f", job).stdout.splitlines()
    report = [line for line in shown if line.startswith("[0] ")]  # srun may have had to wait, and said so
    assert report[:3] == [f"[0] uses 1.0 {made['path']}", "[0] on pods1 with gpu 0", "[0] from the file"]
    assert report[3:] == [f"[0] step {step}" for step in range(3)]
    assert pods.shown(job)["record"]["state"] == "COMPLETED"
    assert (pods.kept(f"{job}/tree/result.txt"), pods.kept(f"{job}/checkpoints/step-2/weights")) == ("42", "2")
    machine = bill(pods.url)["machines"][0]
    assert (machine["type"], machine["region"], machine["usd_hour"]) == ("NVIDIA A40", "EU-RO-1", 0.44)


def test_job_of_a_user_runs_there_as_the_user_and_its_files_return(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    address = pods.cluster.instances()["controller"].address
    (tmp_path / ".ssh/config").write_text(f"Host desktop\n    HostName {address}\n    IdentityFile {pods.key}\n")
    env = {**pods.cluster.env, "HOME": str(tmp_path)}

    def shoal(*words: str) -> str:
        line = [sys.executable, "-m", "shoal", *words]
        done = subprocess.run(line, cwd=pods.tree, env=env, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    shoal("join", "ann@desktop")
    job = json.loads(shoal("run", "--json", "-p", "pods", "-w", "pods1", "train.py", "3", "0.2"))["id"]
    report = [line for line in shoal("logs", "-f", job).splitlines() if line.startswith("[0] ")]
    assert report == ["[0] on pods1 with gpu 0", "[0] from the file", *(f"[0] step {step}" for step in range(3))]
    place = f"{USER_JOBS_DIRECTORY}/ann/{job}"
    assert pods.cluster.on("controller", "cat", f"{place}/checkpoints/step-2/weights") == "2"
    assert set(pods.cluster.on("controller", "find", place, "-printf", r"%u\n").split()) == {"ann"}


def test_container_below_its_nodeset_is_explained_on_the_job(pods: Pods) -> None:
    """RunPod promises 72 CPUs, and the container has those of this machine."""
    wake = ("sbatch", "--parsable", "--partition=large", "--output=/dev/null", "--wrap", "true")
    job = pods.cluster.on("controller", *wake).strip()
    said = "CPUs and nodeset large says 72"
    pods.cluster.wait("it says why it waits", lambda: said in pods.shown(job)["record"]["waits_for"], seconds=120)
    pods.cluster.on("controller", "scancel", job)


def test_script_failure_in_a_container_is_reported_with_its_reason(pods: Pods) -> None:
    job = pods.run("1", "0", "fail")
    report = pods.cluster.shoal("logs", "-f", job, status=None)
    assert "[0] ValueError: no such luck" in report.stdout.splitlines()
    reason = pods.shown(job)["reason"]
    assert reason["text"] == "rank 0 on pods1 failed first, with exit status 1: ValueError: no such luck"
    assert pods.kept(f"{job}/tree/result.txt") == "42"


def test_progress_is_visible_while_a_job_runs_and_cancel_keeps_checkpoints(pods: Pods) -> None:
    job = pods.run("100000", "0.5")
    pods.cluster.wait("its progress is here", lambda: pods.shown(job)["progress"].get("step", 0) >= 2)
    assert pods.kept(f"{job}/checkpoints/step-0/weights") == "0"
    pods.cluster.shoal("cancel", job)
    pods.cluster.wait("it has ended", lambda: pods.shown(job)["record"]["state"] == "CANCELLED")
    printed = [line["text"] for line in pods.cluster.json("logs", job)["lines"] if line["rank"] == 0]
    last = printed[-1].removeprefix("step ")
    assert int(last) >= 2 and pods.kept(f"{job}/checkpoints/step-{last}/weights") == last


def test_idle_container_is_released_and_the_ledger_matches_the_bill(pods: Pods) -> None:
    pods.cluster.wait("it goes", lambda: ended(pods.url), 300)
    pods.cluster.wait("Slurm knows", lambda: asleep(pods.cluster, "pods[1-2]"), 200)
    pods.cluster.wait("their end is known", lambda: pods.cluster.json("cost")["machines"] == 0, seconds=120)
    assert apart(pods.cluster, pods.url, "pods", "large") == ""


def test_sbatch_gets_a_new_container_for_the_same_node(pods: Pods) -> None:
    before = {machine["id"] for machine in bill(pods.url)["machines"]}
    wake = "timeout 250 sbatch --wait -p pods --gpus=1 -o /dev/null --wrap 'srun hostname'"
    pods.cluster.on("controller", "sh", "-c", wake)
    assert len({machine["id"] for machine in bill(pods.url)["machines"]} - before) == 1
    report = pods.cluster.on("controller", "sh", "-c", "journalctl; cat /proc/[0-9]*/cmdline; true")
    assert "shoal-elastic" in report and POD_KEY not in report


# ---- machines


def expected_key(cluster: Cluster, node: str) -> str:
    """The host key that the ledger has for the newest machine of a node."""
    read = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2], sys.argv[3:]).fetchone())"
    query = "SELECT host_key FROM rentals WHERE node = ? ORDER BY intended_at DESC"
    return cluster.on("controller", "python3", "-c", read, "/var/lib/shoal/elastic/ledger.db", query, node).strip()


def boot_scripts() -> list[str]:
    """The boot scripts that the clouds got, as they stored them."""
    directory = Layout(cache_dir(), NAME).dir / "simulators"
    return [path.read_text() for path in directory.glob("*.json")]


def test_job_starts_two_rented_nodes_and_they_are_released(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    assert asleep(cluster, BOTH)
    assert bill(url)["machines"] == []
    show = f"srun sh -c 'hostname; cat /opt/site/note; echo $CUDA_VISIBLE_DEVICES; cut -d \" \" -f 2 {PUBLIC}'"
    job = submit(cluster, BOTH, show, "--gpus-per-node=2")
    cluster.wait("the job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=240)
    assert state(cluster, job) == "COMPLETED", printed(cluster, job)
    said = printed(cluster, job)
    own = {word for word in said if word.startswith("AAAA")}
    assert {*said} - own == {"burst1", "burst2", "0,1", "from", "the", "file"}
    assert len(own) == 2, f"{' '.join(said)} {[expected_key(cluster, node) for node in ('burst1', 'burst2')]}"
    assert len(bill(url)["machines"]) == 2
    # The host keys that they made at the join; nobody else had the private halves.
    assert {expected_key(cluster, node) for node in ("burst1", "burst2")} == {f"ssh-ed25519 {key}" for key in own}
    assert not [script for script in boot_scripts() if any(key in script for key in own)]
    assert "PRIVATE KEY" not in cluster.on("controller", "journalctl", "-u", "shoal-elastic", "--no-pager")
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
    cluster.wait("all of them sleep", lambda: asleep(cluster, BOTH, "spot1"), seconds=240)


@pytest.mark.matrix  # tests/unit/cloud/test_service_restart.py has every step of it
def test_service_killed_repeatedly_orders_nothing_twice_and_leaves_no_machine(
    rented: tuple[Cluster, str],
) -> None:
    cluster, url = rented
    assert asleep(cluster, BOTH)
    before = len(bill(url)["machines"])
    job = submit(cluster, BOTH, "srun hostname")
    for _ in range(6):
        cluster.ssh("controller", "systemctl kill --signal=KILL shoal-elastic; sleep 1; systemctl start shoal-elastic")
    cluster.wait("the job ends", lambda: state(cluster, job) == "COMPLETED", seconds=300)
    cluster.wait("its nodes go", lambda: asleep(cluster, BOTH), seconds=240)
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


def set_faults(url: str, *kinds: str) -> None:
    """From now on the cloud has these faults."""
    faults = json.dumps([{"kind": kind, "times": -1} for kind in kinds]).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/_simulator/faults", faults, method="PUT"), timeout=30):
        pass


def test_stockout_is_shown_on_the_job(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    set_faults(url, "stockout")
    job = submit(cluster, "burst1", "true")

    def comment() -> str:
        return cluster.on("controller", "squeue", "-h", "-j", job, "-O", "admin_comment:200").strip()

    cluster.wait("the job says why it waits", lambda: "out of gpu-2" in comment(), seconds=120)
    assert any("out of gpu-2" in why for why in cluster.json("status")["rented"]["waiting"].values())
    [listed] = [entry for entry in cluster.json("jobs")["jobs"] if entry["record"]["id"] == job]
    assert "out of gpu-2" in listed["record"]["waits_for"]
    cluster.on("controller", "scancel", job)
    set_faults(url)


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


def shorten_timeout(cluster: Cluster) -> None:
    """The service as it is, but it waits for the right key for 15 s and not for three minutes."""
    unit = cluster.on("controller", "systemctl", "cat", "shoal-elastic")
    [python] = re.findall(r"^ExecStart=(\S+) -m shoal.elastic$", unit, re.MULTILINE)
    program = (
        "from shoal.cloud.service import join; join.OTHER_KEY_TIMEOUT_S = 15.0; import shoal.elastic as e; e.main()"
    )
    lines = f'[Service]\nExecStart=\nExecStart={python} -c "{program}"\n'
    place = "/run/systemd/system/shoal-elastic.service.d"
    write = f"mkdir -p {place}; printf %s {shlex.quote(lines)} > {place}/short.conf; systemctl daemon-reload"
    cluster.on("controller", "sh", "-c", f"{write}; systemctl restart shoal-elastic")


def test_machine_with_another_host_key_is_rejected_and_released(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    shorten_timeout(cluster)
    before = {one["id"] for one in bill(url)["machines"]}
    set_faults(url, "other-host-key")
    job = submit(cluster, "enough1", "hostname")

    def rejected() -> bool:
        return any(one["ended"] for one in bill(url)["machines"] if one["id"] not in before)

    cluster.wait("the machine is released", rejected, seconds=500)
    log = cluster.on("controller", "journalctl", "-u", "shoal-elastic", "--no-pager")
    assert "shows another host key than the one that the machine got at boot" in log
    assert state(cluster, job) != "COMPLETED"
    cluster.on("controller", "scancel", job)
