"""Hosts that Shoal did not make, reached over SSH with sudo: first connection, changed keys, full disks, removal.

They are sandbox hosts, but the spec names them by address like any server.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, kill, read_until, stop_connections
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text
from tests.sandbox_faults import SandboxFaults

from shoal.local_files import cache_dir
from shoal.spec.member import Shape

COVERS = (
    "hosts verbs/operator_login verbs/early_login verbs/check verbs/down roles/base roles/host_record plan/ownership "
    "remote/agent"
)
pytestmark = pytest.mark.sandbox

MADE = "t-lent"


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    shapes = {
        "desk": Shape(gpus=1, memory_mb=1024),
        "gpu1": Shape(gpus=1, memory_mb=1024),
        "small": Shape(memory_mb=1024, disk_mb=1500),
        "newer": Shape(memory_mb=512, image="debian13"),
    }
    with lent_hosts(MADE, shapes, "x-window") as made:
        for name, text in HOSTS_FILES.items():
            made.shell(name, f"printf '{text}' > /etc/hosts; ip address add 192.0.2.7/32 dev eth0")
        made.shell("small", "hostname vps-17")
        made.shell("gpu1", "mkdir -p /etc/cloud && touch /etc/cloud/cloud.cfg")
        for name in ("desk", "newer"):
            # Not before all of it has started: what boots writes files too, and so does what runs once a day.
            made.shell(name, "systemctl is-system-running --wait; systemctl stop '*.timer'; touch /root/before")
        yield made


HOSTS_FILES = {
    "desk": "127.0.0.1 localhost\\n127.0.1.1 desk.lab desk\\n",
    "gpu1": "127.0.0.1 localhost gpu1\\n",
    "small": "127.0.1.1 vps-17\\n127.0.0.1 localhost\\n",
}
"""As they may be on hosts that others have made: none of them takes its own name for its address in the network."""


@pytest.fixture(scope="module")
def cluster(lent: Lent, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    text = spec_text("lent", lent, "desk", ("gpu1", "small"), compute=True)
    return Cluster(tmp_path_factory.mktemp("lent"), text)


OUTSIDE = {
    "too old": (
        "newer",
        "desk",
        [
            "desk: Slurm too old for the controller's",
            "Slurm 22.05.8; the controller newer has 24.11.5 and talks to 23.02 to 24.11",
            "install Slurm 23.02 to 24.11 on desk; or take desk out of the spec",
        ],
    ),
    "newer": (
        "desk",
        "newer",
        [
            "newer: Slurm newer than the controller's",
            "Slurm 24.11.5; the controller desk has 22.05.8 and talks to 22.05",
            "install Slurm 22.05 on newer; or take newer out of the spec",
        ],
    ),
}


@ON_DEBIAN_12
@pytest.mark.parametrize("case", list(OUTSIDE))
def test_releases_outside_the_window_are_rejected_and_no_host_changes(lent: Lent, tmp_path: Path, case: str) -> None:
    controller, node, texts = OUTSIDE[case]
    cluster = Cluster(tmp_path, spec_text("x-window", lent, controller, (node,)))
    output = cluster.shoal("up", status=1).stderr
    assert "cannot talk to each other; nothing was changed" in output
    for text in texts:
        assert text in output, output
    assert cluster.shoal("plan", status=1).stderr.endswith(output.partition("error:")[2])
    findings = cluster.json("check", status=1)["findings"]
    assert f"{node}: " + findings[0]["what"] == texts[0] and findings[0]["host"] == node, findings
    assert cluster.json("up", status=1)["error"] == "VersionWindow"
    for name in (controller, node):
        assert_untouched(lent, name)


def assert_untouched(lent: Lent, name: str) -> None:
    """Nothing was installed, no account made, no file written but the agent's own cache and the system's logs."""
    skipped = ("/var/lib/shoal", "/var/log", "/proc", "/sys", "/run", "/dev", "/tmp")
    own = " -o ".join(f"-path {path}" for path in skipped)
    written = lent.shell(name, f"find / \\( {own} \\) -prune -o -newer /root/before -type f -print").split()
    # sshd and sudo remember whom they let in.
    assert [path for path in written if not path.startswith(("/var/lib/sudo/", "/var/lib/systemd/"))] == []
    assert lent.shell(name, "dpkg -l munge slurmd slurmctld slurm-client 2>/dev/null | grep ^ii; true") == ""
    assert lent.shell(name, "ls /etc/munge /etc/slurm /etc/shoal 2>/dev/null; getent passwd munge slurm; true") == ""
    assert lent.shell(name, "nft list tables 2>/dev/null; grep shoal /etc/hosts; true") == ""


def test_full_disk_on_a_host_does_not_stop_the_others(cluster: Cluster) -> None:
    faults = SandboxFaults(cache_dir())
    asyncio.run(faults.fill_disk(MADE, "small"))
    try:
        done = cluster.shoal("up", status=3, timeout=600)
        assert "small: " in done.stdout and "No space left on device" in done.stdout, done.stdout
    finally:
        asyncio.run(faults.empty_disk(MADE, "small"))
    states = cluster.states()
    assert "IDLE" in states["desk"] and "IDLE" in states["gpu1"], states


def test_up_works_through_sudo_and_the_controller_computes(cluster: Cluster) -> None:
    assert cluster.json("up", timeout=600)["whole"]
    names = cluster.on("desk", "srun", "-N3", "hostname").split()
    assert sorted(names) == ["desk", "gpu1", "vps-17"]
    gpu = cluster.on("desk", "srun", "-N2", "--gpus-per-node=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").split()
    assert gpu == ["0", "0"]
    assert cluster.json("up")["unchanged"]


def test_host_of_another_cluster_is_taken_over_only_on_request(cluster: Cluster, lent: Lent, tmp_path: Path) -> None:
    job = cluster.on("desk", "sbatch", "--parsable", "-wgpu1", "--wrap", "sleep 1200", "-o/dev/null").strip()
    cluster.wait("it runs", lambda: state_of(cluster, job) == "RUNNING")
    reach = f"user: shoal, identity: {lent.identity}"
    text = f"cluster: lent2\ncontroller: {{host: {lent.entry('gpu1')}, compute: true, {reach}}}\n"
    other = Cluster(tmp_path, text)
    words = " ".join(other.shoal("up", status=1).stderr.split())
    assert "gpu1: belongs to cluster lent (controller desk" in words, words
    assert f"running: job {job} (root)" in words and "up --take-over" in words, words
    assert state_of(cluster, job) == "RUNNING"
    assert f"running: job {job} (root)" in " ".join(other.shoal("plan", "--take-over").stdout.split())
    assert other.json("up", "--take-over", timeout=600)["whole"]
    assert other.on("gpu1", "srun", "hostname").strip() == "gpu1"
    assert "sleep 1200" not in lent.shell("gpu1", "ps axo args")
    assert "taken over by cluster lent2" in cluster.on("desk", "scontrol", "show", "node", "gpu1")
    refused = cluster.shoal("up", status=1)
    assert "gpu1: is the controller of cluster lent2" in refused.stderr, refused.stderr
    other.shoal("down", "--yes")
    assert cluster.json("up", timeout=600)["whole"], "a host that was released is free"
    cluster.on("desk", "scancel", job)
    cluster.shoal("node", "resume", "gpu1")
    assert cluster.on("desk", "srun", "-wgpu1", "hostname").strip() == "gpu1"


def state_of(cluster: Cluster, job: str) -> str:
    return cluster.on("desk", "squeue", "-ho%T", f"-j{job}").strip()


def test_renamed_cluster_is_rejected_before_anything_changes(cluster: Cluster) -> None:
    before = cluster.on("desk", "cat", "/etc/slurm/slurm.conf")
    cluster.edit("cluster: lent", "cluster: lagoon")
    try:
        refused = " ".join(cluster.shoal("up", status=1).stderr.split())
        assert "`cluster: lent`" in refused, "the fix names the old name"
    finally:
        cluster.edit("cluster: lagoon", "cluster: lent")
    assert cluster.on("desk", "cat", "/etc/slurm/slurm.conf") == before


def test_slurm_listens_only_on_the_network_address_under_any_hostname(lent: Lent) -> None:
    for name, ports in (("desk", {6817, 6818}), ("gpu1", {6818}), ("small", {6818})):
        assert listening(lent, name) == {f"{lent.instances[name].target.address}:{port}" for port in ports}


def listening(lent: Lent, name: str) -> set[str]:
    """Where Slurm's daemons listen on a host. Each has a second address, which is nobody's business."""
    return set(lent.shell(name, "ss -ltnH '( sport = :6817 or sport = :6818 )' | awk '{print $4}'").split())


def test_hosts_file_rewritten_by_cloud_init_is_repaired_before_slurm_starts(lent: Lent) -> None:
    order = lent.shell("gpu1", "systemctl show -P Before shoal-names").split()
    assert {"munge.service", "slurmd.service"} <= set(order)
    before = lent.shell("gpu1", "cat /etc/hosts")
    lent.shell("gpu1", f"printf '{HOSTS_FILES['gpu1']}' > /etc/hosts; systemctl restart shoal-names slurmd")
    assert sorted(lent.shell("gpu1", "cat /etc/hosts").splitlines()) == sorted(before.splitlines())
    # `restart` does not wait until slurmd listens.
    lent.shell("gpu1", "until ss -Hltn | grep -q :6818; do sleep 0.1; done")
    assert listening(lent, "gpu1") == {f"{lent.instances['gpu1'].target.address}:6818"}


@pytest.mark.matrix
def test_listen_address_changes_keep_jobs_running_after_killed_ups(cluster: Cluster, lent: Lent) -> None:
    job = cluster.on("desk", "sbatch", "--parsable", "-wgpu1", "--wrap", "sleep 1200", "-o/dev/null").strip()
    for name, at_all in (("localhost", True), ("vps-17", False)):
        lent.shell("small", f"hostname {name}")
        for phase in ("compare", "packages"):
            up = cluster.background("up")
            read_until(up, phase)
            kill(up)
        assert cluster.json("up", timeout=600)["whole"]
        barred = [
            finding["found"] for finding in cluster.json("check", status=None)["findings"] if finding["host"] == "small"
        ]
        assert barred == (["its host name is localhost"] if at_all else [])
        own = str(lent.instances["desk"].target.address)
        assert listening(lent, "desk") == {f"{'0.0.0.0' if at_all else own}:{port}" for port in (6817, 6818)}
        assert cluster.on("desk", "squeue", "-ho%T", f"-j{job}").strip() == "RUNNING"
        assert len(cluster.on("desk", "srun", "-N3", "--overlap", "--immediate=60", "hostname").split()) == 3
    cluster.on("desk", "scancel", job)


def test_changed_host_key_is_rejected_until_forget_key(cluster: Cluster) -> None:
    renew = (
        "rm /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; systemctl restart ssh"
    )
    cluster.on("gpu1", "sh", "-c", renew, status=None)
    stop_connections()  # one that stays is one to the host as it was
    refused = cluster.shoal("up", status=3)
    assert "gpu1: " in refused.stdout and "key" in refused.stdout and "SHA256:" in refused.stdout, refused.stdout
    assert "--forget-key" in refused.stdout
    cluster.shoal("ssh", "--forget-key", "gpu1")
    assert cluster.json("up")["whole"]


def test_user_without_sudo_is_named_with_the_fix(cluster: Cluster) -> None:
    cluster.on("gpu1", "mv", "/etc/sudoers.d/shoal", "/root/shoal.sudoers", status=None)
    done = cluster.shoal("up", status=3)
    assert "gpu1: " in done.stdout and "sudo" in done.stdout and "NOPASSWD" in done.stdout, done.stdout


def test_down_removes_shoal_from_existing_hosts(cluster: Cluster, lent: Lent) -> None:
    lent.shell("gpu1", "mv /root/shoal.sudoers /etc/sudoers.d/shoal")
    refused = cluster.shoal("down", status=2)
    assert "--yes" in refused.stderr
    cluster.shoal("down", "--yes")
    traces = (
        "ls -A /etc/munge /etc/shoal; ls /etc/slurm/*.conf; grep shoal /etc/hosts /etc/default/slurmd; nft list tables"
    )
    left = cluster.json("exec", "--", "sh", "-c", f"({traces}) 2>/dev/null", status=None)
    # Debian's own package brings plugstack.conf.
    listings = {tuple(group["stdout"].split()) for group in left["groups"]}
    assert listings == {("/etc/munge:", "/etc/shoal:", "/etc/slurm/plugstack.conf")}, listings
    for name, text in HOSTS_FILES.items():
        assert lent.shell(name, "cat /etc/hosts") == text.replace("\\n", "\n"), name
    active = cluster.json("exec", "--", "systemctl", "is-active", "slurmd", "slurmctld", "munge", status=None)
    assert all("active" not in group["stdout"].split() for group in active["groups"])


def test_munge_key_is_in_no_output(cluster: Cluster, tmp_path: Path) -> None:
    """Built again under another name, with everything that the command prints kept and searched for the key."""
    cluster.edit("cluster: lent", "cluster: harbour")  # which has recorded no host keys
    output = cluster.shoal("up", "--json", timeout=600).stdout + cluster.shoal("plan", "--diff").stdout
    key = cluster.on("desk", "base64", "-w0", "/etc/munge/munge.key").strip()
    raw = cluster.on("desk", "od", "-An", "-tx1", "-v", "/etc/munge/munge.key").replace(" ", "").replace("\n", "")
    assert len(key) > 1000
    assert "slurmctld.lent" in cluster.on("desk", "ls", "/var/lib/slurm"), "the state of the old name is kept aside"
    assert key not in output and raw not in output
    arguments = cluster.json("exec", "--", "sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")
    assert all(key[:40] not in group["stdout"] for group in arguments["groups"])
