"""A cluster of virtual machines: what only a kernel of the host's own can show.

    .venv/bin/pytest -m matrix -n0 -s tests/e2e/test_vm.py

prints the table that bench/results/vm.txt holds. The tests share one cluster and run in the order of this file.
With SHOAL_TEST_KEEP=DIR the cluster stays, and the next run uses it as it is: under emulation `up` takes minutes.
`shoal down --force --file DIR/shoal.yaml` with SHOAL_CACHE as in tests/installed_images.py removes it.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, kill, read_until, running
from tests.e2e.test_wireguard import DDP
from tests.e2e.torch_env import give_torch
from tests.vm_faults import (
    break_disk,
    mount_failing_disk,
    remove_memory,
    shell,
    shift_clock,
    slow_down,
    speed_up,
    start,
)

from shoal.sandbox.qemu import recorded_accelerator

COVERS = "sandbox/vm sandbox/vm_disk sandbox/qemu network/wireguard storage"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(7200)]

SPEC = """\
cluster: vm-sites
sandbox: vm
network: wireguard
controller: {provider: sandbox, cpus: 2, compute: true}
nodesets:
  node: {provider: sandbox, count: 1, gpus: 2, cpus: 2, site: b}
storage:
  /data: {kind: nfs}
users:
  alice: {uid: 2001}
"""
NODE = "node1"
"""On a site of its own. Two hosts are what two cores emulate in useful time, so the controller is the other node."""
SLOW = 5400.0
"""Seconds for what ends by itself in an emulated cluster on a busy machine."""
DELAY_MS, LOSS_PERCENT = 50, 1
AS_ALICE, QUIET = "runuser -u alice --", f"-w {NODE} -o /dev/null --chdir=/tmp"
OPEN_BOTH = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done; true"
WRITER = """\
import itertools, os, time
out = os.open("/data/written", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for line in itertools.count():
    os.write(out, b"%d\\n" % line)
    os.fsync(out)
    with open("/var/tmp/synced", "w") as note:
        note.write(str(line))
    if os.path.exists("/var/tmp/enough"):
        break
    time.sleep(0.2)
"""
ROWS: list[str] = []
"""What was shown, what was seen, and the seconds of the test until then."""
BEGIN = {"test": 0.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if kept := os.environ.get("SHOAL_TEST_KEEP"):
        made = Cluster(Path(kept), SPEC)
        if not made.instances():
            assert made.json("up", timeout=SLOW)["whole"]
        yield made
    else:
        begin = time.monotonic()
        with running(tmp_path_factory.mktemp("vm"), SPEC, timeout=SLOW) as made:
            print(f"\n`up` builds the cluster: {time.monotonic() - begin:.0f} s")
            yield made
    print_table(made)


@pytest.fixture(autouse=True)
def note_begin(cluster: Cluster) -> None:
    BEGIN["test"] = time.monotonic()


def seen(what: str, result: str) -> None:
    ROWS.append(f"{what:<64} {time.monotonic() - BEGIN['test']:5.0f} s  {result}")
    print(f"\n{ROWS[-1]}")


def print_table(cluster: Cluster) -> None:
    accelerator = recorded_accelerator(cluster.provider.cache)
    print(f"\n\n{os.uname().machine}, {os.cpu_count()} cores, {'KVM' if accelerator == 'kvm' else 'emulation'}\n")
    print("\n".join(ROWS))


def srun(cluster: Cluster, node: str, *words: str) -> str:
    return cluster.ssh("controller", f"srun -w {node} --immediate=120 {' '.join(words)} 2>&1").stdout


def boot_id(cluster: Cluster, host: str) -> str:
    return cluster.ssh(host, "cat /proc/sys/kernel/random/boot_id").stdout


def test_each_host_runs_a_kernel_of_its_own(cluster: Cluster) -> None:
    kernels = {shell(cluster, host, "uname -r").strip() for host in ("controller", NODE)}
    assert all("cloud" in kernel for kernel in kernels), kernels
    assert len({boot_id(cluster, host) for host in ("controller", NODE)}) == 2
    shell(cluster, NODE, "echo from the node > /shared/note")
    assert shell(cluster, "controller", "cat /shared/note") == "from the node\n"
    seen("each host runs a kernel of its own; /shared is common", ", ".join(kernels))


def assert_confined(cluster: Cluster, node: str) -> None:
    """A job on the node, which has two cores and two GPUs, has only what it asked for."""
    assert shell(cluster, node, "stat -fc %T /sys/fs/cgroup").strip() == "cgroup2fs"
    assert srun(cluster, node, "-c1", "nproc").strip() == "1"
    assert srun(cluster, node, "-c2", "nproc").strip() == "2"
    said = srun(cluster, node, "--gpus=1", "bash", "-c", f"'{OPEN_BOTH}'")
    assert "open 0" in said and "open 1" not in said and "Operation not permitted" in said, said
    take = "import sys; sys.stdout.write(str(len(bytearray(150 << 20))))"
    assert str(150 << 20) in srun(cluster, node, "--mem=250M", f'python3 -c "{take}"')
    killed = srun(cluster, node, "--mem=60M", f'python3 -c "{take}"')
    assert "Out Of Memory" in killed or "oom" in killed.lower(), killed


def test_cgroup_v2_confines_cores_memory_and_gpus(cluster: Cluster) -> None:
    assert_confined(cluster, NODE)
    seen("cgroup v2: a job has its cores, its GPU device, its memory", "confined; OOM reported")


def test_login_to_the_node_needs_a_job_and_becomes_part_of_it(cluster: Cluster) -> None:
    login = f"{AS_ALICE} ssh -o BatchMode=yes {NODE} cat /proc/self/cgroup 2>&1"
    denied = cluster.ssh("controller", login)
    assert denied.returncode != 0 and "pam_slurm_adopt" in denied.stdout, denied
    job = shell(cluster, "controller", f"{AS_ALICE} sbatch --parsable {QUIET} --wrap 'sleep 9999'")
    try:
        cluster.wait("runs", lambda: "RUNNING" in cluster.ssh("controller", "squeue -h -o %T").stdout, 300)
        groups = shell(cluster, "controller", login)
        assert f"job_{job.strip()}/" in groups, groups
    finally:
        shell(cluster, "controller", f"scancel {job.strip()}")
    seen("pam_slurm_adopt on cgroup v2: login without a job, with a job", "denied; in the job's cgroup")


def test_kernel_serves_and_mounts_nfs(cluster: Cluster) -> None:
    exports = shell(cluster, "controller", "cat /proc/fs/nfsd/exports; exportfs -v")
    assert "root_squash" in exports and "/data" in exports, exports
    assert cluster.ssh("controller", "pgrep ganesha").returncode != 0
    cluster.wait("mounted", lambda: cluster.ssh(NODE, "ls /data").returncode == 0)
    assert "nfs4" in shell(cluster, NODE, "grep ' /data ' /proc/mounts")
    assert "active" in shell(cluster, NODE, "systemctl is-active data.automount")
    shell(cluster, "controller", "install -d -m 755 /data/roots; install -d -m 1777 /data/all")
    assert cluster.ssh(NODE, "touch /data/roots/mine").returncode != 0
    shell(cluster, NODE, "touch /data/all/mine")
    assert shell(cluster, "controller", "stat -c %u /data/all/mine").strip() == "65534"
    seen("kernel NFS 4.2: export, automount, root_squash", "as written")


def test_job_survives_a_reboot_of_its_nfs_server(cluster: Cluster) -> None:
    shell(cluster, "controller", f"install -d -m 1777 /data/all; cat > /data/all/writer.py <<'E'\n{WRITER}\nE")
    shell(cluster, "controller", "chmod 1777 /data; rm -f /data/written")
    shell(cluster, NODE, "rm -f /var/tmp/enough /var/tmp/synced")
    submit = f"{AS_ALICE} sbatch --parsable {QUIET} --wrap 'python3 /data/all/writer.py'"
    job = shell(cluster, "controller", submit).strip()

    def synced() -> int:
        return int(cluster.ssh(NODE, "cat /var/tmp/synced 2> /dev/null").stdout or -1)

    cluster.wait("it writes", lambda: synced() >= 10)
    begin = time.monotonic()
    cluster.fault("reboot", "controller")
    back, before = time.monotonic() - begin, synced()
    cluster.wait("it writes again", lambda: synced() >= before + 10, 900)
    shell(cluster, NODE, "touch /var/tmp/enough")
    ended = f"scontrol show job {job}"
    cluster.wait("it ends", lambda: "JobState=COMPLETED" in cluster.ssh("controller", ended).stdout, 900)
    assert shell(cluster, NODE, "cat /data/written").split() == [str(line) for line in range(synced() + 1)]
    seen("the controller, which serves NFS, reboots under a running job", f"no synced line lost; back in {back:.0f} s")


def test_node_boots_while_its_nfs_server_is_away(cluster: Cluster) -> None:
    before = boot_id(cluster, NODE)
    for host in (NODE, "controller"):
        cluster.fault("kill", host)
    start(cluster, NODE)
    assert boot_id(cluster, NODE) not in ("", before)
    start(cluster, "controller")
    cluster.wait("mounted again", lambda: cluster.ssh(NODE, "ls /data/all").returncode == 0, 900)
    wait_for_jobs(cluster)
    seen("a node boots while its NFS server has no power", "SSH answers; mounts and takes jobs once the server is back")


@pytest.mark.parametrize("fault", ["kill", "reboot"])
def test_node_takes_jobs_again_after(cluster: Cluster, fault: str) -> None:
    before = boot_id(cluster, NODE)
    cluster.fault(fault, NODE)
    if fault == "kill":
        start(cluster, NODE)
    assert boot_id(cluster, NODE) not in ("", before)
    wait_for_jobs(cluster)
    seen(f"a node takes jobs again after a {'power cut' if fault == 'kill' else 'reboot'}", "yes")


def wait_for_jobs(cluster: Cluster) -> None:
    """Wait until the node runs jobs again."""
    cluster.wait("takes jobs", lambda: srun(cluster, NODE, "hostname").strip().endswith(NODE), 900)


def test_chronyd_corrects_a_clock_that_is_minutes_off(cluster: Cluster) -> None:
    """munge rejects credentials five minutes old: the node is lost to Slurm until its clock is right."""
    shell(cluster, NODE, "systemctl stop chrony")
    shift_clock(cluster, NODE, 420)
    found = [one["what"] for one in cluster.json("check", status=None, timeout=SLOW)["findings"]]
    assert any("clock" in what for what in found), found
    shell(cluster, NODE, "systemctl start chrony")

    def offset() -> float:
        return abs(float(cluster.ssh(NODE, "date +%s.%N").stdout) - time.time())

    begin = time.monotonic()
    cluster.wait("the clock is right", lambda: offset() < 30, 900)
    took = time.monotonic() - begin
    wait_for_jobs(cluster)
    left = [one["what"] for one in cluster.json("check", status=None, timeout=SLOW)["findings"]]
    assert not any("clock" in what for what in left), left
    seen("chronyd corrects a clock that is 7 minutes off", f"{took:.0f} s after its start; `check` reports it")


def test_quotas_hold_and_status_shows_them(cluster: Cluster) -> None:
    shell(cluster, "controller", "command -v setquota > /dev/null || apt-get install -qy --no-install-recommends quota")
    shell(cluster, "controller", "quotaon -u / 2> /dev/null; setquota -u alice 5000 6000 0 0 / && chmod 1777 /data")
    fill = "runuser -u alice -- dd if=/dev/zero of=/data/hers bs=1M count=20 2>&1; rm -f /data/hers"
    assert "quota exceeded" in cluster.ssh(NODE, fill).stdout
    [share] = [share for share in cluster.json("status", timeout=SLOW)["shares"] if share["where"] == "/data"]
    assert "alice" in str(share), share
    shell(cluster, "controller", "setquota -u alice 0 0 0 0 /")
    seen("quota of a user over NFS: enforced, shown by `status`", "yes")


def test_udev_rule_names_a_device(cluster: Cluster) -> None:
    rule = 'SUBSYSTEM=="block", KERNEL=="ram0", SYMLINK+="shoal-disk"'
    shell(cluster, NODE, f"echo '{rule}' > /etc/udev/rules.d/90-test.rules; udevadm control --reload; modprobe brd")
    shell(cluster, NODE, "udevadm settle; test -b /dev/shoal-disk; rm /etc/udev/rules.d/90-test.rules; rmmod brd")
    seen("udev rule: a device gets its name", "yes")


def test_failing_and_full_disk_reach_the_job(cluster: Cluster) -> None:
    mount_failing_disk(cluster, NODE, "/scratch")
    full = srun(cluster, NODE, "dd if=/dev/zero of=/scratch/file bs=1M count=100")  # a job without GPUs has /dev/zero
    assert "No space left on device" in full, full
    shell(cluster, NODE, "rm -f /scratch/file")
    break_disk(cluster, NODE)
    failed = srun(cluster, NODE, "sh -c 'ls -R /scratch; dd if=/dev/zero of=/scratch/x bs=1M count=1 conv=fsync'")
    assert "Input/output error" in failed or "Read-only" in failed, failed
    seen("full disk, failing disk (device mapper): the job sees the error", "yes")


def test_docker_engine_and_the_firewall_live_together(cluster: Cluster) -> None:
    shell(cluster, NODE, "systemctl enable --now docker")  # tests/installed_images.py installs it
    cluster.wait("Docker runs", lambda: cluster.ssh(NODE, "docker info").returncode == 0, 600)
    shell(cluster, NODE, "systemctl restart docker shoal-firewall")
    rules = shell(cluster, NODE, "nft list ruleset")
    assert "DOCKER" in rules and "shoal" in rules
    assert srun(cluster, NODE, "hostname").strip().endswith(NODE)
    # A share has 5 s to answer, which an emulated host on a busy machine does not always make.
    cluster.wait("`check` has no errors", lambda: errors(cluster) == [], 600)
    shell(cluster, NODE, "systemctl disable --now docker docker.socket containerd")
    seen("Docker engine beside the firewall: both rule sets, jobs run", "yes")


def errors(cluster: Cluster) -> list[object]:
    """What `check` says is an error."""
    return [item for item in cluster.json("check", status=None, timeout=SLOW)["findings"] if item["level"] == "error"]


def test_node_with_less_memory_is_drained_and_named(cluster: Cluster) -> None:
    remove_memory(cluster, NODE, 512)

    def reported() -> bool:
        state = cluster.ssh("controller", f"scontrol show node {NODE}").stdout
        return re.search(r"Reason=.*[Mm]emory", state) is not None

    cluster.wait("Slurm says so", reported, 900)
    remove_memory(cluster, NODE, 1024)
    resume = f"scontrol update NodeName={NODE} State=RESUME"  # rejected until slurmd has said how much there is now
    cluster.wait("resumed", lambda: cluster.ssh("controller", resume).returncode == 0, 900)
    wait_for_jobs(cluster)
    seen("memory removed between boots, and put back", "node drained: low memory; then it takes jobs")


def test_up_interrupted_by_a_power_cut_is_finished_by_the_next(cluster: Cluster, tmp_path: Path) -> None:
    cluster.edit("gpus: 2", "gpus: 2, features: [cut]")
    process = cluster.background("up")
    read_until(process, "connect and read facts")
    cluster.fault("kill", NODE)
    output, _ = process.communicate(timeout=SLOW)
    assert process.returncode != 0, output
    kill(process)
    assert cluster.json("up", timeout=SLOW)["whole"]
    assert "cut" in shell(cluster, "controller", f"scontrol show node {NODE}")
    again = cluster.json("up", timeout=SLOW)
    assert again["whole"] and not again["changed"], again
    seen("`up` interrupted by a power cut of a host", "finished by the next `up`; the one after has no changes")


@pytest.fixture(scope="module")
def slow_link(cluster: Cluster) -> Iterator[dict[str, float]]:
    """Delay and loss between the sites for the tests that follow; the round trip before that, in ms."""
    speed_up(cluster, NODE)
    before = round_trip(cluster)
    slow_down(cluster, NODE, "a", delay_ms=DELAY_MS, loss=LOSS_PERCENT)
    yield {"before": before}
    speed_up(cluster, NODE)


def round_trip(cluster: Cluster) -> float:
    """What `bench links` measures between the sites, in ms."""
    links = cluster.json("bench", "links", timeout=SLOW)["links"]
    return float(next(link["rtt_ms"] for link in links if link["target"] == NODE))


def test_wireguard_is_the_kernels_and_passes_its_largest_packet(cluster: Cluster) -> None:
    for host, other in (("controller", NODE), (NODE, "controller")):
        assert "wireguard" in shell(cluster, host, "ip -d link show shoal0")
        assert cluster.ssh(host, "pgrep wireguard-go").returncode != 0
        mtu = int(shell(cluster, host, "cat /sys/class/net/shoal0/mtu"))
        ping = f"ping -c1 -w60 -M do -s {mtu - 28} {other}"
        assert "1 received" in shell(cluster, host, ping)
        assert cluster.ssh(host, f"ping -c1 -w5 -M do -s {mtu - 27} {other}").returncode != 0
    seen("WireGuard is the kernel's; its largest packet passes", f"MTU {mtu}")


def test_bench_links_measures_what_netem_was_set_to(cluster: Cluster, slow_link: dict[str, float]) -> None:
    after = round_trip(cluster)
    assert after >= slow_link["before"] + DELAY_MS / 2, (slow_link, after)
    rtt = f"{slow_link['before']:.1f} ms before, {after:.1f} ms with netem"
    seen(f"`bench links` with {DELAY_MS} ms and {LOSS_PERCENT} % loss between sites", rtt)


def test_training_on_two_nodes_over_a_slow_lossy_link(cluster: Cluster, slow_link: dict[str, float]) -> None:
    packages = give_torch(cluster.name, cluster.env)
    (cluster.file.parent / "ddp.py").write_text(f"{DDP}import os\nprint('over', os.environ['GLOO_SOCKET_IFNAME'])\n")
    refused = cluster.ssh("controller", "srun -N2 --immediate=60 hostname")
    assert "--switches=2" in refused.stderr, refused
    size = ("-N2", "--switches", "2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "--mem", "700M")
    line = cluster.line("run", *size, "--export", f"PYTHONPATH={packages}", "--wait", "ddp.py")
    done = subprocess.run(line, cwd=cluster.file.parent, env=cluster.env, capture_output=True, text=True, timeout=SLOW)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"{host} has the same weights" in done.stdout for host in ("controller", NODE)), done.stdout
    assert "over shoal0" in done.stdout, done.stdout
    seen("training (gloo) on two nodes of two sites over that link", "same weights on both; over shoal0")


def test_keys_rotate_over_a_slow_lossy_link(cluster: Cluster, slow_link: dict[str, float]) -> None:
    def keys() -> set[str]:
        return {shell(cluster, host, "wg show shoal0 public-key") for host in ("controller", NODE)}

    old = keys()
    [report] = cluster.json("keys", "rotate", "wireguard", timeout=SLOW)["rotated"]
    assert sorted(report["hosts"]) == ["controller", NODE], report
    assert len(keys()) == 2 and not keys() & old
    wait_for_jobs(cluster)
    seen("WireGuard keys rotate over that link", "new keys on both; jobs run")


def test_up_and_check_over_a_slow_lossy_link(cluster: Cluster, slow_link: dict[str, float]) -> None:
    assert cluster.json("up", timeout=SLOW)["whole"]
    assert errors(cluster) == []
    seen("`up` and `check` over that link", "whole; no errors")
