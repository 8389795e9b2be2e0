"""Ranks that meet, ranks that do not, and what is said about those. Threads stand for ranks; no torch."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.train import boards
from shoal.train.addresses import own_addresses
from shoal.train.boards import Board, Door, FileBoard, PortBoard, ports_of
from shoal.train.env import Env, read_env
from shoal.train.errors import RendezvousError
from shoal.train.rendezvous import Meeting, Patience, meet

BoardOf = Callable[[Env], Board]


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


def patience(said: list[str] | None = None, *, timeout: float = 60.0, explain_after: float = 50.0) -> Patience:
    return Patience(timeout, explain_after, say=(said if said is not None else []).append)


def on_loopback() -> list[str]:
    return ["127.0.0.1"]


def by_ports(env: Env) -> Board:
    return PortBoard(on_loopback, env.key)


@pytest.fixture(params=["a file", "ports"])
def board_of(request: pytest.FixtureRequest, tmp_path: Path) -> BoardOf:
    """Each way to find rank 0 that needs no torch."""
    return by_ports if request.param == "ports" else lambda env: FileBoard(tmp_path, env.key)


def start(pool: ThreadPoolExecutor, env: Env, board: Board, waits: Patience) -> Future[Meeting]:
    return pool.submit(meet, env, board, on_loopback, waits)


def text_of(error: BaseException | str | None) -> str:
    """An error's text without its count of seconds, which is the machine's business."""
    return re.sub(r"waited \d+ s", "waited N s", str(error))


def close(meeting: Meeting) -> None:
    if meeting.listener:
        meeting.listener.close()


def test_all_ranks_learn_one_port_on_which_rank_zero_listens(board_of: BoardOf) -> None:
    envs = [rank_of(rank, world_size=4) for rank in range(4)]
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, board_of(env), patience()) for env in reversed(envs)]
        met = [future.result() for future in waiting]
    assert {meeting.store_port for meeting in met} == {met[-1].store_port}
    assert {(meeting.store_address, meeting.own_address) for meeting in met} == {("127.0.0.1", "127.0.0.1")}
    assert met[-1].listener is not None
    assert met[-1].listener.getsockname()[1] == met[-1].store_port
    close(met[-1])


def test_a_rank_that_is_missing_is_named_with_its_node_before_the_time_is_up_and_after(board_of: BoardOf) -> None:
    said: list[str] = []
    envs = [rank_of(rank, world_size=4, nodes=2) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, board_of(env), patience(said, timeout=8, explain_after=4)) for env in envs]
        errors = [future.exception() for future in waiting]
    assert text_of(errors[0]) == (
        "rank 0 on gpu1 waited N s for 2 of 4 ranks\n"
        "  found: ranks 2, 3 on gpu2 are not here;"
        " the host answers (127.0.0.2): the network is there, the process is not\n"
        "  fix: look at the log of rank 2: it has failed, or has not come to init() yet."
        " And does srun start 4 tasks (--ntasks, --ntasks-per-node)?"
    )
    assert str(errors[1]) == str(errors[0])  # rank 1 was there, and is told why it waited for nothing
    assert len(said) == 1
    assert text_of(said[0]).startswith(
        "shoal: still waiting (up to 8 s). rank 0 on gpu1 waited N s for 2 of 4 ranks\n  found: ranks 2"
    )


def test_without_rank_zero_the_others_say_where_they_looked(tmp_path: Path) -> None:
    env = rank_of(3, world_size=4, nodes=2)
    with pytest.raises(RendezvousError) as error:
        meet(env, FileBoard(tmp_path, env.key), on_loopback, patience(timeout=1, explain_after=9))
    assert text_of(error.value) == (
        "rank 3 on gpu2 waited N s and did not reach rank 0 on gpu1\n"
        f"  found: rank 0 has not written its address to the directory {tmp_path};"
        " the host answers (127.0.0.1): the network is there, the process is not\n"
        "  fix: look at rank 0's log: it has ended, or has not come to init() yet"
    )


def test_without_rank_zero_and_without_a_shared_directory_the_row_of_ports_is_summed_up() -> None:
    env = rank_of(1, job="without-rank-zero")
    with pytest.raises(RendezvousError) as error:
        meet(env, by_ports(env), on_loopback, patience(timeout=4, explain_after=9))
    assert error.value.found == f"127.0.0.1: rank 0 is at none of {len(ports_of(env.key))} ports (refused: 32)"


def test_ranks_that_count_differently_are_told_at_once(board_of: BoardOf) -> None:
    zero, one = rank_of(0), rank_of(1, world_size=4)
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, board_of(env), patience()) for env in (zero, one)]
        errors = [str(future.exception()) for future in waiting]
    assert (
        errors
        == [
            "the ranks do not agree on the world size\n"
            "  found: rank 0 on gpu1 counts 2, rank 1 on gpu1 counts 4\n"
            "  fix: start all ranks with one command: one srun, one mpirun"
        ]
        * 2
    )


def test_two_processes_with_one_rank_are_told_at_once(tmp_path: Path) -> None:
    zero = rank_of(0, world_size=4, nodes=2)
    here, there = rank_of(3, world_size=4, nodes=2), rank_of(3, world_size=4, nodes=2)
    object.__setattr__(there, "node", "gpu9")
    with ThreadPoolExecutor() as pool:
        waiting = [start(pool, env, FileBoard(tmp_path, env.key), patience()) for env in (zero, here, there)]
        errors = {str(future.exception()).partition("\n")[0] for future in waiting}
    assert errors == {"two processes say that they are rank 3"}


def test_a_rank_that_came_and_ended_is_remembered(tmp_path: Path) -> None:
    env = rank_of(0, world_size=3)
    board = FileBoard(tmp_path, env.key)
    with ThreadPoolExecutor() as pool:
        waiting = start(pool, env, board, patience(timeout=6, explain_after=9))
        doors: list[Door] = []
        while not doors:
            doors = board.doors()
        with socket.create_connection((doors[0].address, doors[0].port)) as guest:
            hello = f'{{"shoal": "{env.key}", "nonce": "{doors[0].nonce}", "rank": 1, "world_size": 3, '
            guest.sendall((hello + '"node": "gpu1", "pid": 77}\n').encode())
            assert guest.makefile().readline() == f'{{"welcome": "{doors[0].nonce}"}}\n'
        error = waiting.exception()
    assert isinstance(error, RendezvousError)
    assert error.found == "ranks 1, 2 on gpu1 are not here\n  rank 1 was here and ended (process 77 on gpu1)"


def test_a_notice_left_by_an_earlier_start_does_not_mislead(tmp_path: Path) -> None:
    zero, one = rank_of(0), rank_of(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # whoever has that port now
        FileBoard(tmp_path, one.key).publish([Door("127.0.0.1", silent.getsockname()[1], "old")])
        with ThreadPoolExecutor() as pool:
            late = start(pool, one, FileBoard(tmp_path, one.key), patience())
            first = start(pool, zero, FileBoard(tmp_path, zero.key), patience())
            assert first.result().store_port == late.result().store_port
            close(first.result())


def test_who_answers_at_an_old_address_without_the_word_is_not_followed(tmp_path: Path) -> None:
    """A program that took the port over and says what rank 0 would say, but for the word of the notice."""
    zero, one = rank_of(0), rank_of(1)
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor() as pool:
        FileBoard(tmp_path, one.key).publish([Door("127.0.0.1", impostor.getsockname()[1], "old")])
        late = start(pool, one, FileBoard(tmp_path, one.key), patience())
        knocking, _ = impostor.accept()
        with knocking:
            knocking.sendall(b'{"welcome": "mine"}\n{"go": ["127.0.0.1", 1, "127.0.0.1"]}\n')
            first = start(pool, zero, FileBoard(tmp_path, zero.key), patience())
            assert late.result().store_port == first.result().store_port != 1
        close(first.result())


def test_the_notice_is_for_its_user_only_and_gone_when_all_have_met(tmp_path: Path) -> None:
    env = rank_of(0)
    board = FileBoard(tmp_path, env.key)
    board.publish([Door("127.0.0.1", 1, "word")])
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600]
    board.leave_note(1, "cannot come")
    assert board.notes() == {1: "cannot come"}
    board.clear()
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_know_the_word_is_not_let_in(tmp_path: Path) -> None:
    env = rank_of(0)
    board = FileBoard(tmp_path, env.key)
    with ThreadPoolExecutor() as pool:
        waiting = start(pool, env, board, patience(timeout=6, explain_after=9))
        doors: list[Door] = []
        while not doors:
            doors = board.doors()
        for hello in (
            f'{{"shoal": "{env.key}", "nonce": "", "rank": 1, "world_size": 2}}\n',
            "GET / HTTP/1.0\n",
            "[]\n",
        ):
            with socket.create_connection((doors[0].address, doors[0].port)) as stranger:
                stranger.sendall(hello.encode())
                assert stranger.makefile().readline() == '{"refused": "not this job"}\n'
        assert isinstance(waiting.exception(), RendezvousError)


def test_strangers_on_a_jobs_ports_are_passed_by() -> None:
    """The first ports of the row belong to something that says nothing, something that greets, and another job."""
    zero, one, stranger = rank_of(0), rank_of(1), rank_of(0, job="another")
    row = ports_of(zero.key)
    with socket.create_server(("127.0.0.1", row[0])), socket.create_server(("127.0.0.1", row[1])) as greeter:
        threading.Thread(target=_greet, args=(greeter,), daemon=True).start()
        with ThreadPoolExecutor() as pool:
            third = start(pool, stranger, PortBoard(on_loopback, "none", row[2]), patience(timeout=6, explain_after=20))
            while not _listens(row[2]):
                pass
            met = [start(pool, env, by_ports(env), patience()) for env in (zero, one)]
            assert met[0].result().store_port == met[1].result().store_port
            close(met[0].result())
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


def test_the_rows_of_two_jobs_differ_and_stay_below_the_ports_of_outgoing_connections() -> None:
    rows = [ports_of(str(job)) for job in range(50)]
    assert len({tuple(row) for row in rows}) == 50
    assert all(port in boards.PORTS and port < 32_768 for row in rows for port in row)


def test_rank_zero_offers_the_address_it_was_told_before_any_other() -> None:
    assert own_addresses(rank_of(0, nodes=2, world_size=2)) != ["127.0.0.1"]
    env = rank_of(0, nodes=2, world_size=2)
    told = {"gpu1": "192.0.2.77", "gpu2": "192.0.2.78"}
    object.__setattr__(env, "addresses", told)
    assert own_addresses(env)[0] == "192.0.2.77"


@pytest.mark.parametrize("board", ["file", "ports"])
def test_fifty_jobs_start_at_once_on_one_node_and_each_meets_its_own(board: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("fifty_jobs.py")
    ended = subprocess.run(
        [sys.executable, str(program), board, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.stdout, ended.returncode) == ("50 jobs met\n", 0), ended.stderr
