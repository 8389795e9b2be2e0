"""Tests of the container set, chosen from four files, on one cluster of virtual machines; then what only they can show.

    SHOAL_TEST_KIND=vm .venv/bin/pytest -m matrix -n0 -s tests/e2e/test_vm_acceptance.py

They share one cluster of controller, login host and two nodes, and run in the order of STEPS: under emulation one `up`
takes minutes.
With SHOAL_TEST_KEEP=DIR the cluster stays, and the next run uses it as it is; `shoal down` as in test_vm.py removes it.
"""

import inspect
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import test_account_limits, test_cluster, test_confinement, test_storage, test_wireguard
from tests.e2e.cluster import KIND, LIMIT, Cluster, running
from tests.e2e.test_storage import Lab
from tests.vm_faults import shell, slow_down, speed_up

COVERS = "sandbox/vm roles/compute storage network/wireguard"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(KIND != "vm", reason="by hand, with SHOAL_TEST_KIND=vm: it takes an hour under emulation"),
]

SPEC = """\
cluster: vm-accept
network: wireguard
controller: {{provider: sandbox, cpus: 2, memory: 1G}}
login: {{provider: sandbox, count: 1, cpus: 2, memory: 1G}}
nodesets:
  fish: {{provider: sandbox, count: 2, gpus: 2, cpus: 2, memory: 1G, site: b}}
storage:
  /home: {{kind: nfs}}
  /data: {{kind: nfs, host: fish2}}
  /scratch: {{kind: stage}}
users:
  alice: {{uid: 2001, groups: [team], keys: ["file:{keys}/alice.pub"]}}
  bob: {{uid: 2002, groups: [team], keys: ["file:{keys}/bob.pub"]}}
"""
NEAR = "  near: {provider: sandbox, kind: container, count: 1, memory: 1G}\n"
"""A container host beside the virtual machines, on the controller's site, as test_wireguard.py has it."""
RATE_MBIT = 4
SMALL_MTU, WIREGUARD_OVERHEAD = 1400, 80
SET_RTC = """\
import fcntl, struct, time
at = time.gmtime(time.time() + 420)
fields = (at.tm_sec, at.tm_min, at.tm_hour, at.tm_mday, at.tm_mon - 1, at.tm_year - 1900, 0, 0, 0)
fcntl.ioctl(open("/dev/rtc0", "wb"), 0x4024700A, struct.pack("9i", *fields))
"""
"""Sets the machine's own clock (RTC_SET_TIME), from which the kernel takes the time at boot."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    kept = os.environ.get("SHOAL_TEST_KEEP")
    place = Path(kept) if kept else tmp_path_factory.mktemp("accept")
    for user in ("alice", "bob"):
        if not (place / user).exists():
            line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / user)]
            subprocess.run(line, check=True, timeout=LIMIT)
    text = SPEC.format(keys=place)
    if kept:
        made = Cluster(place, (place / "shoal.yaml").read_text() if (place / "shoal.yaml").exists() else text)
        if not made.instances():
            with timed("`up` builds the cluster"):
                assert made.json("up")["whole"]
        yield as_lab(made, place)
    else:
        with running(place, text) as made:
            yield as_lab(made, place)


def as_lab(cluster: Cluster, keys: Path) -> Lab:
    cluster.__class__ = Lab
    assert isinstance(cluster, Lab)
    cluster.keys = keys
    cluster.release = "22.05"  # type: ignore[attr-defined]
    return cluster


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"\n{what:<100} {time.monotonic() - begin:5.0f} s")


def rate_limit_and_delay_between_sites_are_measured(lab: Lab) -> None:
    try:
        slow_down(lab, "fish1", "a", mbit=RATE_MBIT)
        limited = speed(lab, "fish1", "near1")
        slow_down(lab, "fish1", "a", delay_ms=50, loss=1)
        slow = speed(lab, "fish1", "near1")
    finally:
        speed_up(lab, "fish1")
    print(f"\nfish1 to near1: {limited['mbit']:.1f} Mbit/s with {RATE_MBIT} set; with 50 ms and 1 %: {slow}")
    assert limited["mbit"] < RATE_MBIT * 1.3, limited
    assert slow["rtt_ms"] >= 50, slow


def rate_limit_makes_nccl_open_one_connection(lab: Lab) -> None:
    """A link that a limit fills needs no more. Settings follow links inside a site: jobs span sites only on request."""
    try:
        slow_down(lab, "fish1", "b", mbit=RATE_MBIT)
        limited = speed(lab, "fish1", "fish2")
        assert limited["mbit"] < RATE_MBIT * 1.3, limited
        lab.json("up")
        assert "NCCL_SOCKET_NTHREADS=1" in lab.on("fish1", "cat", "/etc/shoal/nccl.env")
        variables = "NCCL_SOCKET_IFNAME NCCL_NET NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD"
        (lab.file.parent / "show.py").write_text(f"import os\nprint(*map(os.environ.get, {variables.split()}))\n")
        nodes = ("-N2", "--gpus-per-node", "0", "--nodelist", "fish1,fish2")
        line = lab.line("run", "--json", "--wait", *nodes, "show.py")
        done = subprocess.run(
            line, cwd=lab.file.parent, env=lab.env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert "=shoal0 Socket 1 1" in done.stdout, done
        print(f"\nfish1 to fish2: {limited['mbit']:.1f} Mbit/s with {RATE_MBIT} set; a job has =shoal0 Socket 1 1")
    finally:
        speed_up(lab, "fish1")


def delay_and_loss_make_nccl_open_more_connections(lab: Lab) -> None:
    """With both, sixteen connections are faster than one."""
    try:
        slow_down(lab, "fish1", "b", delay_ms=50, loss=1)
        slow = speed(lab, "fish1", "fish2")
        lab.json("up")
        setting = lab.on("fish1", "cat", "/etc/shoal/nccl.env")
        print(f"\nfish1 to fish2 with 50 ms and 1 %: {slow}; {setting.split()}")
        assert slow["rtt_ms"] >= 50, slow
        each = 4 if slow["mbit_many"] >= 1.2 * slow["mbit"] else 1
        assert f"NCCL_SOCKET_NTHREADS={each}\n" in setting, (slow, setting)
        assert [item for item in lab.json("check", status=None)["findings"] if item["level"] == "error"] == []
    finally:
        speed_up(lab, "fish1")


def speed(lab: Lab, source: str, target: str) -> dict[str, Any]:
    """What `bench links` measures from one host to another."""
    links = lab.json("bench", "links", "--hosts", f"{source},{target}", "--seconds", "8")["links"]
    return next(link for link in links if (link["source"], link["target"]) == (source, target))


def smaller_mtu_of_one_host_is_followed(lab: Lab) -> None:
    """The largest packet passes in both directions, and a larger one does not leave."""
    shell(lab, "fish1", f"ip link set eth0 mtu {SMALL_MTU}")
    try:
        assert lab.json("up")["whole"]
        fits = SMALL_MTU - WIREGUARD_OVERHEAD
        for host, other in (("fish1", "controller"), ("controller", "fish1")):
            assert "1 received" in shell(lab, host, f"ping -c1 -w60 -M do -s {fits - 28} {other}")
            assert lab.ssh(host, f"ping -c1 -w5 -M do -s {fits - 27} {other}").returncode != 0, (host, other)
        output = shell(lab, "controller", "srun -w fish1 head -c 3000000 /dev/zero | wc -c")
        assert output.strip() == "3000000"
    finally:
        shell(lab, "fish1", "ip link set eth0 mtu 1500")
    assert lab.json("up")["whole"]


def topology_follows_sites(lab: Lab) -> None:
    topology = lab.on("controller", "scontrol", "show", "topology")
    assert re.search(r"SwitchName=\S*b\S* .*Nodes=fish", topology), topology


def clock_that_is_wrong_at_boot_is_corrected(lab: Lab) -> None:
    """Seven minutes: munge would reject what the node sends. chronyd steps the clock before the node takes jobs."""
    shell(lab, "fish1", f"python3 -c {shlex.quote(SET_RTC)}")
    lab.fault("reboot", "fish1")

    def offset() -> float:
        return abs(float(lab.ssh("fish1", "date +%s.%N").stdout) - time.time())

    at_boot = offset()
    lab.wait("the clock is right", lambda: offset() < 20)
    lab.wait("the node takes jobs", lambda: test_wireguard.works(lab, "fish1"))
    stepped = lab.shell("fish1", "journalctl -b -u chrony -o cat | grep -i 'wrong by\\|stepped'")
    assert "420" in stepped or "41" in stepped, stepped
    rejected = lab.shell("controller", "journalctl -u munge -o cat | grep -ci 'rewound\\|expired' || true").strip()
    assert not [item for item in lab.json("check", status=None)["findings"] if "clock" in item["what"]]
    print(
        f"\noff at the first login by {at_boot:.0f} s; {stepped.strip()}; credentials that munge rejected: {rejected}"
    )


def container_joins_the_virtual_machines(lab: Lab) -> None:
    """Both kinds on one bridge: a job over both, the same files, and users of one uid."""
    if "near:" not in lab.file.read_text():
        lab.edit("storage:\n", f"{NEAR}storage:\n")
    assert lab.json("up")["whole"]
    nodes = test_confinement.nodes(lab)
    assert {"fish1", "near1"} <= set(nodes), nodes
    across = lab.on("controller", *test_wireguard.SRUN, f"-N{len(nodes)}", "--switches=2", "hostname")
    assert sorted(across.split()) == sorted(nodes)
    kernels = {host: lab.on(host, "uname", "-r").strip() for host in ("controller", "fish1", "near1")}
    assert kernels["near1"] == os.uname().release and "cloud" in kernels["fish1"], kernels
    lab.shell("controller", "echo both > /home/alice/both; chown alice /home/alice/both")
    for host in ("near1", "fish1"):
        assert lab.shell(host, "runuser -u alice -- cat /home/alice/both") == "both\n"
    assert [item for item in lab.json("check", status=None)["findings"] if item["level"] == "error"] == []


def account_limits_are_set_and_removed(lab: Lab) -> None:
    lab.file.write_text(lab.file.read_text() + test_account_limits.ACCOUNTING)
    assert lab.json("up")["whole"]
    test_account_limits.assert_limits_follow_the_spec(lab)


STEPS: list[Callable[..., object]] = [
    test_cluster.test_up_makes_nodes_that_slurm_can_use,
    test_cluster.test_srun_reaches_every_node_from_controller_and_login_host,
    test_cluster.test_tasks_get_their_own_gpu,
    test_cluster.test_key_is_equal_on_all_hosts_and_readable_only_by_its_user,
    test_cluster.test_names_resolve_on_every_host,
    test_cluster.test_ssh_runs_a_command,
    test_storage.test_users_have_equal_ids_on_all_hosts_and_a_second_up_has_no_changes,
    test_storage.test_job_of_a_user_on_two_nodes_writes_to_the_home_directory,
    test_storage.test_ssh_to_a_node_needs_a_job_there,
    test_storage.test_ssh_from_node_to_node_works_inside_a_job_and_nowhere_else,
    test_storage.test_symbolic_links_on_a_share_work_on_every_host,
    test_storage.test_ports_of_shares_are_closed_from_outside_the_cluster,
    test_storage.test_secrets_of_shares_are_not_readable_by_others,
    test_storage.test_job_continues_and_no_synced_data_is_lost_when_a_server_is_killed,
    test_storage.test_staged_share_is_copied_before_a_job_and_back_after_the_job,
    test_confinement.test_jobs_are_tracked_and_confined_by_cgroups,
    test_confinement.test_job_opens_only_its_own_gpus,
    test_confinement.test_two_jobs_on_a_node_hold_different_gpus,
    test_confinement.test_background_processes_end_with_their_job,
    test_confinement.test_job_memory_is_limited_to_its_request,
    test_confinement.test_rank_killed_for_its_memory_is_named,
    container_joins_the_virtual_machines,
    topology_follows_sites,
    test_wireguard.test_each_host_has_its_own_private_key_readable_only_by_root,
    test_wireguard.test_jobs_run_inside_a_site_by_default_and_across_sites_on_request,
    rate_limit_and_delay_between_sites_are_measured,
    rate_limit_makes_nccl_open_one_connection,
    delay_and_loss_make_nccl_open_more_connections,
    smaller_mtu_of_one_host_is_followed,
    clock_that_is_wrong_at_boot_is_corrected,
    test_wireguard.test_host_without_its_interface_sends_no_network_traffic_elsewhere,
    test_wireguard.test_lost_nat_state_is_restored_before_slurm_marks_nodes_down,
    test_wireguard.test_disconnected_site_reconnects,
    test_wireguard.test_all_keys_rotate_while_a_job_runs_across_sites,
    test_cluster.test_node_can_be_drained_and_resumed,
    test_cluster.test_wrong_key_on_a_host_is_reported_and_replaced,
    test_cluster.test_partition_changes_while_a_job_runs,
    test_cluster.test_hosts_recover_after_a_reboot,
    test_storage.test_shares_are_mounted_again_after_a_reboot,
    test_storage.test_removed_user_is_locked_and_keeps_files_and_can_be_added_again,
    account_limits_are_set_and_removed,
    test_cluster.test_down_is_rejected_while_jobs_run_and_removes_everything,
]
"""What follows the container needs it as a third node. The accounts come last: users without one can run no job."""


def step_name(step: Callable[..., object]) -> str:
    return f"{step.__module__.rpartition('.')[2]}-{step.__name__.removeprefix('test_')}"


@pytest.mark.parametrize("step", STEPS, ids=step_name)
def test_on_virtual_machines(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Callable[..., object]
) -> None:
    given = {"lab": lab, "cluster": lab, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    arguments = {name: given[name] for name in inspect.signature(step).parameters}
    with timed(step_name(step)):
        step(**arguments)
