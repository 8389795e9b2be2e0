"""Complete ranks with torch and Gloo: on two hosts with misleading networks, under torchrun, spawned, and alone."""

import contextlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from tests.unit.train.procs import start_script
from tests.unit.train.two_hosts import ADDRESSES, ONE_RANK, RENDEZVOUS_ONLY, TwoHosts, outcome, two_hosts

from shoal.train import multiprocess, rendezvous_errors
from shoal.train.dist import REPORT_AFTER_S, init, set_threads, use_interface
from shoal.train.env import read_env
from shoal.train.errors import EnvError
from shoal.train.interfaces import interface_of, is_loopback, nccl_gloo_variables, source_address
from shoal.train.multiprocess import child_variables
from shoal.train.rendezvous import Rendezvous

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2"
)


def srun(rank: int, ranks: int = 2) -> dict[str, str]:
    """The variables of one task on each of two nodes."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NODELIST": f"gpu[1-{ranks}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{ranks})",
        "SLURMD_NODENAME": f"gpu{rank + 1}",
    }


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


@needs_namespaces
@pytest.mark.parametrize("shared", [True, False], ids=["a shared directory", "nothing shared"])
def test_ranks_use_the_network_that_connects_them(hosts: TwoHosts, tmp_path: Path, shared: bool) -> None:
    more = {"SHOAL_STORE_DIR": str(tmp_path / "store")} if shared else {}
    running = [hosts.start(rank, srun(rank) | more, ONE_RANK) for rank in (0, 1)]
    said = [outcome(process)[0] for process in running]
    assert [found["total"] for found in said] == [3.0, 3.0]
    assert {found["master"] for found in said} == {ADDRESSES[0]}
    assert [found["variables"] for found in said] == [
        {"GLOO_SOCKET_IFNAME": "mesh0", "NCCL_SOCKET_IFNAME": "=mesh0", "TP_SOCKET_IFNAME": "mesh0"}
    ] * 2


@needs_namespaces
def test_network_that_drops_packets_is_reported_by_both_sides(hosts: TwoHosts, tmp_path: Path) -> None:
    hosts.cut()
    more = {"SHOAL_STORE_DIR": str(tmp_path / "store")}
    running = [hosts.start(rank, srun(rank) | more, RENDEZVOUS_ONLY, "15", "6") for rank in (0, 1)]
    (zero, zero_said), (one, one_said) = [outcome(process) for process in running]
    assert "rank 1 on gpu2: missing; the host does not answer (10.231.77.2)" in zero["error"]
    assert re.search(r"rank 1 reports: .*10\.231\.77\.1 port \d+: no answer within 2 s", zero["error"])
    assert "a firewall between them is the usual cause" in zero["error"]
    assert re.search(r"rank 1 on gpu2 waited \d+ s and did not reach rank 0 on gpu1", one["error"])
    assert "no answer within 2 s; route: mesh0 from 10.231.77.2" in one["error"]
    for said in (zero_said, one_said):
        assert "shoal: still waiting (up to 15 s)." in said


@needs_namespaces
def test_missing_node_is_reported(hosts: TwoHosts, tmp_path: Path) -> None:
    addresses = "gpu1=10.231.77.1,gpu2=10.231.77.2,gpu3=10.231.77.3"
    more = {"SHOAL_STORE_DIR": str(tmp_path / "store"), "SHOAL_NODE_ADDRS": addresses}
    running = [hosts.start(rank, srun(rank, ranks=3) | more, RENDEZVOUS_ONLY, "15", "8") for rank in (0, 1)]
    errors = [outcome(process)[0]["error"] for process in running]
    assert errors[0] == errors[1]
    assert "for 1 of 3 ranks\n  found: rank 2 on gpu3: missing; the host does not answer (10.231.77.3)" in errors[0]


def test_missing_ranks_are_named_within_15_seconds_by_default() -> None:
    """The wait, then the probes of a host with two addresses, on two ports each, none of which answers."""
    assert inspect.signature(init).parameters["explain_after"].default == REPORT_AFTER_S
    assert REPORT_AFTER_S + 2 * len(rendezvous_errors.PROBE_PORTS) * rendezvous_errors.PROBE_TIMEOUT_S <= 15


TORCHRUN, SPAWN = Path(torch.distributed.run.__file__), Path(multiprocess.__file__)


def run(script: Path, *arguments: str, errors: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a script to its end. Returns the JSON of its ranks, in the order of ranks, and all other output."""
    process, output = start_script(script, *arguments, errors=errors, OMP_NUM_THREADS="1")
    with output:
        said = [json.loads(line) for line in output if line.startswith("{")]
    process.join(600)
    assert process.exitcode == 0, errors.read_text()
    return sorted(said, key=lambda found: int(found["rank"])), errors.read_text()


@pytest.mark.parametrize(
    ("launcher", "program", "options"),
    [
        ("torchrun", TORCHRUN, ["--standalone", "--nproc-per-node=2"]),
        ("torchrun", TORCHRUN, ["--master-port=0", "--nproc-per-node=2"]),
        ("spawn", SPAWN, ["--nprocs=2"]),
    ],
    ids=["torchrun --standalone", "torchrun with a static rendezvous", "spawn"],
)
def test_script_runs_unchanged_under_each_launcher(
    tmp_path: Path, launcher: str, program: Path, options: list[str]
) -> None:
    options = [option.replace("port=0", f"port={free_port()}") for option in options]
    said, beside = run(program, *options, str(ONE_RANK), errors=tmp_path / "errors")
    assert [(found["rank"], found["launcher"], found["total"]) for found in said] == [
        (0, launcher, 3.0),
        (1, launcher, 3.0),
    ]
    assert {(found["master"], found["interface"]) for found in said} == {("127.0.0.1", "lo")}
    assert said[0]["port"] == said[1]["port"] != 0
    assert re.search(r"rank +node +local rank +GPU\n0 +\S+ +0 +none\n1 +\S+ +1 +none\nNo rank has a GPU", beside)


def test_script_runs_unchanged_alone_without_opening_a_port(tmp_path: Path) -> None:
    said, _ = run(ONE_RANK, errors=tmp_path / "errors")
    assert [(found["launcher"], found["total"], found["port"]) for found in said] == [("python", 1.0, 0)]


def free_port() -> int:
    """A port without a listener, below those that the kernel gives to outgoing connections of other tests."""
    while True:
        port = random.SystemRandom().randrange(16_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def test_spawn_forwards_signals_to_its_ranks_and_returns_their_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def stop(number, _): sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
        "time.sleep(120)\n"
    )
    process, output = start_script(SPAWN, "--nprocs", "2", str(script), str(tmp_path), errors=tmp_path / "errors")
    with output:
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)
        process.join(120)
    assert process.exitcode == 75


def test_spawn_numbers_ranks_over_nodes_and_rejects_several_starts_per_node() -> None:
    one = srun(1)
    told = child_variables(read_env(one), 1, 2, 0, "/tmp/unused")
    env = read_env(one | told)
    assert (env.rank, env.world_size, env.node_rank, env.node, env.node_of(2)) == (3, 4, 1, "gpu2", "gpu2")
    crowded = one | {"SLURM_STEP_NODELIST": "gpu2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    with pytest.raises(EnvError) as refusal:
        child_variables(read_env(crowded), 0, 2, 0, "/tmp/unused")
    assert str(refusal.value) == (
        "spawn() starts all ranks of a node, but is itself started several times on this node\n"
        "  found: 2 processes of srun on gpu2\n"
        "  fix: srun --ntasks-per-node=1"
    )


def test_user_variables_are_kept_and_a_missing_interface_is_rejected() -> None:
    env, met = read_env(srun(0)), Rendezvous("127.0.0.1", 1, "127.0.0.1")
    environ = {"NCCL_SOCKET_IFNAME": "^docker0"}
    assert use_interface(env, met, environ) == "lo"
    assert environ == {"NCCL_SOCKET_IFNAME": "^docker0", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    with pytest.raises(EnvError) as refusal:
        use_interface(env, met, {"SHOAL_INTERFACE": "ib7"})
    assert str(refusal.value).startswith(
        "SHOAL_INTERFACE names an interface that gpu1 does not have, or that has no address\n"
        "  found: SHOAL_INTERFACE=ib7; this host has "
    )
    assert refusal.value.fix == "unset SHOAL_INTERFACE: the interface is then chosen by the route to rank 0"


def test_tunnel_gets_more_sockets_than_the_nccl_default() -> None:
    assert nccl_gloo_variables("wg-not-a-card")["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert "NCCL_NSOCKS_PERTHREAD" not in nccl_gloo_variables("lo")


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)]
)
def test_loopback_addresses_are_detected(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_route_to_another_host_comes_from_the_kernel() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""
    assert source_address("no-such-name.invalid") == ""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_ranks_of_a_node_share_its_cpus() -> None:
    cpus = len(os.sched_getaffinity(0))
    alone = read_env({})
    set_threads(alone, {})
    assert torch.get_num_threads() == cpus
    set_threads(read_env({"RANK": "0", "WORLD_SIZE": str(cpus)}), {})
    assert torch.get_num_threads() == 1
    set_threads(alone, {"OMP_NUM_THREADS": "7"})  # torch has read it itself when it was imported
    assert torch.get_num_threads() == 1
    set_threads(read_env(srun(0)), {"SLURM_CPUS_PER_TASK": str(cpus)})
    assert torch.get_num_threads() == cpus


@pytest.mark.usefixtures("threads")
def test_rank_bound_to_a_single_cpu_by_srun_is_warned_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    set_threads(read_env(srun(0)), {"SLURM_CPUS_ON_NODE": "1"})
    assert caplog.text == "", "it has all there are"
    set_threads(read_env(srun(0)), {"SLURM_CPUS_ON_NODE": "16"})
    assert "rank 0 can use 1 of the job's 16 CPUs on gpu1" in caplog.text
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun" in caplog.text
