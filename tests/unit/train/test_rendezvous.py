"""The rendezvous: complete, with missing ranks, and its errors. Threads stand for ranks, except in fifty real jobs."""

import re
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.train.procs import start_script

from shoal.train import address_exchange
from shoal.train.address_exchange import (
    AddressExchange,
    Endpoint,
    FileExchange,
    PortExchange,
    candidate_ports,
    own_addresses,
)
from shoal.train.env import Env, read_env
from shoal.train.errors import RendezvousError
from shoal.train.rendezvous import Rendezvous, RendezvousTimer, join_rendezvous

ExchangeOf = Callable[[Env], AddressExchange]


def rank_of(rank: int, *, world_size: int = 2, nodes: int = 1, job: str = "9") -> Env:
    """A rank as srun makes it, on so many nodes, all of them addresses of this host."""
    on_node = world_size // nodes
    return read_env(
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % on_node),
            "SLURM_NODEID": str(rank // on_node),
            "SLURM_STEP_NUM_TASKS": str(world_size),
            "SLURM_STEP_NODELIST": f"gpu[1-{nodes}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{on_node}(x{nodes})",
            "SHOAL_NODE_ADDRS": ",".join(f"gpu{node}=127.0.0.{node}" for node in range(1, nodes + 1)),
        }
    )


def make_timer(
    output: list[str] | None = None, *, timeout: float = 60.0, report_after: float = 50.0
) -> RendezvousTimer:
    return RendezvousTimer(timeout, report_after, write=(output if output is not None else []).append)


def on_loopback() -> list[str]:
    return ["127.0.0.1"]


def by_ports(env: Env) -> AddressExchange:
    return PortExchange(on_loopback, env.key)


@pytest.fixture(params=["a file", "ports"])
def exchange_of(request: pytest.FixtureRequest, tmp_path: Path) -> ExchangeOf:
    """Each way to find rank 0 that needs no torch."""
    return by_ports if request.param == "ports" else lambda env: FileExchange(tmp_path, env.key)


def start(pool: ThreadPoolExecutor, env: Env, exchange: AddressExchange, timer: RendezvousTimer) -> Future[Rendezvous]:
    return pool.submit(join_rendezvous, env, exchange, on_loopback, timer)


def text_of(error: BaseException | str | None) -> str:
    """An error's text without its count of seconds, which is the machine's business."""
    return re.sub(r"waited \d+ s", "waited N s", str(error))


def close(rendezvous: Rendezvous) -> None:
    if rendezvous.listener:
        rendezvous.listener.close()


def test_all_ranks_get_a_single_port_on_which_rank_0_listens(exchange_of: ExchangeOf) -> None:
    envs = [rank_of(rank, world_size=4) for rank in range(4)]
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, exchange_of(env), make_timer()) for env in reversed(envs)]
        results = [future.result() for future in waiting]
    assert {result.store_port for result in results} == {results[-1].store_port}
    assert {(result.store_address, result.own_address) for result in results} == {("127.0.0.1", "127.0.0.1")}
    assert results[-1].listener is not None
    assert results[-1].listener.getsockname()[1] == results[-1].store_port
    close(results[-1])


def test_missing_ranks_are_named_with_their_node_before_and_at_the_timeout(exchange_of: ExchangeOf) -> None:
    output: list[str] = []
    envs = [rank_of(rank, world_size=4, nodes=2) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, exchange_of(env), make_timer(output, timeout=8, report_after=4)) for env in envs]
        errors = [future.exception() for future in waiting]
    assert text_of(errors[0]) == (
        "rank 0 on gpu1 waited N s for 2 of 4 ranks\n"
        "  found: ranks 2, 3 on gpu2: missing; the host answers (127.0.0.2), the process does not\n"
        "  fix: read the log of rank 2: it has failed, or has not called init() yet;"
        " check that srun starts 4 tasks (--ntasks, --ntasks-per-node)"
    )
    assert str(errors[1]) == str(errors[0])  # rank 1 was connected, and gets the same error
    assert len(output) == 1
    assert text_of(output[0]).startswith(
        "shoal: still waiting (up to 8 s). rank 0 on gpu1 waited N s for 2 of 4 ranks\n  found: ranks 2"
    )


def test_missing_rank_0_is_reported_with_the_searched_directory(tmp_path: Path) -> None:
    env = rank_of(3, world_size=4, nodes=2)
    with pytest.raises(RendezvousError) as error:
        join_rendezvous(env, FileExchange(tmp_path, env.key), on_loopback, make_timer(timeout=1, report_after=9))
    assert text_of(error.value) == (
        "rank 3 on gpu2 waited N s and did not reach rank 0 on gpu1\n"
        f"  found: rank 0 has not written its address to the directory {tmp_path};"
        " the host answers (127.0.0.1), the process does not\n"
        "  fix: read rank 0's log: it has ended, or has not called init() yet"
    )


def test_missing_rank_0_without_shared_storage_is_reported_with_its_ports() -> None:
    env = rank_of(1, job="without-rank-zero")
    with pytest.raises(RendezvousError) as error:
        join_rendezvous(env, by_ports(env), on_loopback, make_timer(timeout=4, report_after=9))
    assert (
        error.value.found
        == f"127.0.0.1: rank 0 is on none of {len(candidate_ports(env.key))} ports (connection refused: 32)"
    )


def test_different_world_sizes_fail_at_once(exchange_of: ExchangeOf) -> None:
    zero, one = rank_of(0), rank_of(1, world_size=4)
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, exchange_of(env), make_timer()) for env in (zero, one)]
        errors = [str(future.exception()) for future in waiting]
    assert (
        errors
        == [
            "the ranks have different world sizes\n"
            "  found: 2 on rank 0 (gpu1), 4 on rank 1 (gpu1)\n"
            "  fix: start all ranks with one command: one srun, one mpirun"
        ]
        * 2
    )


def test_duplicate_rank_fails_at_once(tmp_path: Path) -> None:
    zero = rank_of(0, world_size=4, nodes=2)
    here, there = rank_of(3, world_size=4, nodes=2), rank_of(3, world_size=4, nodes=2)
    object.__setattr__(there, "node", "gpu9")
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, FileExchange(tmp_path, env.key), make_timer()) for env in (zero, here, there)]
        errors = {str(future.exception()).partition("\n")[0] for future in waiting}
    assert errors == {"two processes have rank 3"}


def test_rank_that_connected_and_ended_is_named(tmp_path: Path) -> None:
    env = rank_of(0, world_size=3)
    exchange = FileExchange(tmp_path, env.key)
    with ThreadPoolExecutor() as pool:
        waiting = start(pool, env, exchange, make_timer(timeout=6, report_after=9))
        endpoints: list[Endpoint] = []
        while not endpoints:
            endpoints = exchange.endpoints()
        with socket.create_connection((endpoints[0].address, endpoints[0].port)) as guest:
            hello = f'{{"shoal": "{env.key}", "nonce": "{endpoints[0].nonce}", "rank": 1, "world_size": 3, '
            guest.sendall((hello + '"node": "gpu1", "pid": 77}\n').encode())
            assert guest.makefile().readline() == f'{{"welcome": "{endpoints[0].nonce}"}}\n'
        error = waiting.exception()
    assert isinstance(error, RendezvousError)
    assert error.found == "ranks 1, 2 on gpu1: missing\n  rank 1 was connected and ended (process 77 on gpu1)"


def test_stale_address_of_an_earlier_start_is_skipped(tmp_path: Path) -> None:
    zero, one = rank_of(0), rank_of(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # another program has that port now
        FileExchange(tmp_path, one.key).publish([Endpoint("127.0.0.1", silent.getsockname()[1], "old")])
        with ThreadPoolExecutor() as pool:
            late = start(pool, one, FileExchange(tmp_path, one.key), make_timer())
            first = start(pool, zero, FileExchange(tmp_path, zero.key), make_timer())
            assert first.result().store_port == late.result().store_port
            close(first.result())


def test_process_without_the_nonce_is_not_accepted_as_rank_0(tmp_path: Path) -> None:
    """A program on the old port that answers as rank 0 would, without the nonce."""
    zero, one = rank_of(0), rank_of(1)
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor() as pool:
        FileExchange(tmp_path, one.key).publish([Endpoint("127.0.0.1", impostor.getsockname()[1], "old")])
        late = start(pool, one, FileExchange(tmp_path, one.key), make_timer())
        knocking, _ = impostor.accept()
        with knocking:
            knocking.sendall(b'{"welcome": "mine"}\n{"go": ["127.0.0.1", 1, "127.0.0.1"]}\n')
            first = start(pool, zero, FileExchange(tmp_path, zero.key), make_timer())
            assert late.result().store_port == first.result().store_port != 1
        close(first.result())


def test_published_file_is_private_and_removed_after_the_rendezvous(tmp_path: Path) -> None:
    env = rank_of(0)
    exchange = FileExchange(tmp_path, env.key)
    exchange.publish([Endpoint("127.0.0.1", 1, "nonce")])
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600]
    exchange.report_failure(1, "cannot connect")
    assert exchange.failure_reports() == {1: "cannot connect"}
    exchange.clear()
    assert list(tmp_path.iterdir()) == []


def test_connection_without_the_nonce_is_rejected(tmp_path: Path) -> None:
    env = rank_of(0)
    exchange = FileExchange(tmp_path, env.key)
    with ThreadPoolExecutor() as pool:
        waiting = start(pool, env, exchange, make_timer())
        endpoints: list[Endpoint] = []
        while not endpoints:
            endpoints = exchange.endpoints()
        for hello in (
            f'{{"shoal": "{env.key}", "nonce": "", "rank": 1, "world_size": 2}}\n',
            "GET / HTTP/1.0\n",
            "[]\n",
        ):
            with socket.create_connection((endpoints[0].address, endpoints[0].port)) as stranger:
                stranger.sendall(hello.encode())
                assert stranger.makefile().readline() == '{"refused": "not this job"}\n'
        one = start(pool, rank_of(1), FileExchange(tmp_path, env.key), make_timer())
        assert waiting.result().store_port == one.result().store_port, "only the rank itself is let in"
        close(waiting.result())


def test_other_programs_on_the_job_ports_are_skipped() -> None:
    """The first ports of the list belong to a silent program, one that sends a greeting, and another job."""
    zero, one, stranger = rank_of(0), rank_of(1), rank_of(0, job="another")
    row = candidate_ports(zero.key)
    with socket.create_server(("127.0.0.1", row[0])), socket.create_server(("127.0.0.1", row[1])) as greeter:
        threading.Thread(target=_greet, args=(greeter,), daemon=True).start()
        with ThreadPoolExecutor() as pool:
            third = start(
                pool, stranger, PortExchange(on_loopback, "none", row[2]), make_timer(timeout=6, report_after=20)
            )
            while not _listens(row[2]):
                pass
            both = [start(pool, env, by_ports(env), make_timer()) for env in (zero, one)]
            assert both[0].result().store_port == both[1].result().store_port
            close(both[0].result())
            assert third.exception() is not None


def _greet(server: socket.socket) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        with sock:
            sock.sendall(b"SSH-2.0-greeter\r\n")


def _listens(port: int) -> bool:
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


def test_ports_differ_between_jobs_and_stay_below_the_ephemeral_range() -> None:
    rows = [candidate_ports(str(job)) for job in range(50)]
    assert len({tuple(row) for row in rows}) == 50
    assert all(port in address_exchange.PORT_RANGE and port < 32_768 for row in rows for port in row)


def test_rank_0_publishes_its_configured_address_first() -> None:
    assert own_addresses(rank_of(0, nodes=2, world_size=2)) != ["127.0.0.1"]
    env = rank_of(0, nodes=2, world_size=2)
    addresses = {"gpu1": "192.0.2.77", "gpu2": "192.0.2.78"}
    object.__setattr__(env, "addresses", addresses)
    assert own_addresses(env)[0] == "192.0.2.77"


@pytest.mark.parametrize("exchange", ["file", "ports"])
def test_fifty_concurrent_jobs_on_a_node_do_not_mix(exchange: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("fifty_jobs.py")
    errors = tmp_path / "errors"
    jobs, output = start_script(program, exchange, str(tmp_path / "jobs"), errors=errors)
    with output:
        printed = output.read()
    jobs.join(300)
    assert (printed, jobs.exitcode) == ("50 jobs connected\n", 0), errors.read_text()
