"""A job starts as soon as its nodes are ready: what is held until then, and what releases it."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal.cloud.service.slurm_requests import WAITING_COMMAND, JobStarter
from shoal.errors import SlurmError
from shoal.hosts.api import Result
from shoal.roles.elastic import START_CHECK_INTERVAL_S, STARTS, start_program
from shoal_simulators.fake_host import FakeHost

LIMIT = 60.0


class Slurm:
    """squeue and sinfo as the service calls them, with their output."""

    def __init__(self, waiting: str, nodes: str = "") -> None:
        self.waiting = Result(0, waiting.encode())
        self.nodes = Result(0, nodes.encode())
        self.host = FakeHost("c1", {WAITING_COMMAND: lambda call: self.waiting, ("sinfo",): lambda call: self.nodes})

    @property
    def asked(self) -> list[str]:
        return [call.argv[0] for call in self.host.calls]


@contextmanager
def pipe(place: Path, name: str) -> Iterator[int]:
    """A pipe with a program that reads it."""
    os.mkfifo(place / name)
    handle = os.open(place / name, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield handle
    finally:
        os.close(handle)


def left(place: Path) -> list[str]:
    return sorted(os.listdir(place))


def told(handle: int) -> bool:
    try:
        return os.read(handle, 10) == b"\n"
    except BlockingIOError:
        return False


async def test_job_starts_when_all_its_nodes_are_ready(tmp_path: Path) -> None:
    slurm = Slurm("7 cloud[1-2],n1\n8 cloud3\n", "cloud1 alloc\ncloud2 alloc#\ncloud3 idle~\nn1 mix\n")
    starts = JobStarter(slurm.host, tmp_path)
    with pipe(tmp_path, "7.100") as seven, pipe(tmp_path, "8.101") as eight:
        await starts.step()
        assert not told(seven) and not told(eight)
        slurm.nodes = Result(0, b"cloud1 alloc\ncloud2 alloc\ncloud3 alloc#\nn1 mix\n")
        await starts.step()
        assert told(seven) and not told(eight)
    assert left(tmp_path) == ["8.101"]
    [ask] = {call.argv for call in slurm.host.calls if call.argv[0] == "sinfo"}
    assert ask == ("sinfo", "-h", "-N", "-n", "cloud[1-3],n1", "-o", "%N %t")


async def test_requeued_job_stops_waiting(tmp_path: Path) -> None:
    slurm = Slurm("9 cloud1\n", "cloud1 alloc#\n")
    with pipe(tmp_path, "7.100") as seven:
        await JobStarter(slurm.host, tmp_path).step()
        assert told(seven)
    assert left(tmp_path) == []


async def test_slurm_is_not_queried_without_waiting_jobs(tmp_path: Path) -> None:
    slurm = Slurm("")
    await JobStarter(slurm.host, tmp_path).step()
    await JobStarter(slurm.host, tmp_path / "not made yet").step()
    assert slurm.asked == []


async def test_pipe_of_a_killed_program_is_removed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "7.100")
    await JobStarter(Slurm("").host, tmp_path).step()
    assert left(tmp_path) == []


async def test_jobs_keep_waiting_while_slurmctld_is_unreachable(tmp_path: Path) -> None:
    slurm = Slurm("")
    slurm.waiting = Result(1, stderr=b"Unable to contact slurm controller\n")
    with pipe(tmp_path, "7.100") as seven:
        with pytest.raises(SlurmError, match="squeue -h: Unable to contact slurm controller"):
            await JobStarter(slurm.host, tmp_path).step()
        assert not told(seven)
        slurm.waiting, slurm.nodes = Result(0, b"7 cloud1\n"), Result(1)
        with pytest.raises(SlurmError, match="sinfo -h: exit status 1"):
            await JobStarter(slurm.host, tmp_path).step()
        assert not told(seven)


async def test_only_pipes_are_written_and_removed(tmp_path: Path) -> None:
    place = tmp_path / "starts"
    place.mkdir()
    secret = tmp_path / "secret"
    os.mkfifo(secret)
    (place / "7.100").symlink_to(secret)
    (place / "8.101").write_text("mine\n")
    with pipe(place, ".9.102") as hidden:
        await JobStarter(Slurm("").host, place).step()
        assert not told(hidden)
    assert (place / "8.101").read_text() == "mine\n"
    assert left(place) == [".9.102", "7.100", "8.101"]


# The program that slurmctld runs before each job


class Prolog:
    """job_start.sh with a squeue and a sinfo that print files."""

    def __init__(self, place: Path, *, look: str = str(START_CHECK_INTERVAL_S)) -> None:
        self.place = place
        self.starts = place / "starts"
        self.starts.mkdir()
        programs = place / "bin"
        for name in ("squeue", "sinfo"):
            stand_in(programs / name, f'echo "$@" >> {place}/asked\ncat {place}/{name}')
        self.program = place / "start"
        self.program.write_text(
            start_program().replace(STARTS, str(self.starts)).replace(f"-t {START_CHECK_INTERVAL_S}", f"-t {look}")
        )
        self.program.chmod(0o755)
        self.env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "cloud[1-2]"}

    def says(self, waiting: str, states: str) -> None:
        """Written beside and moved, so that it is never read half."""
        for name, text in (("squeue", waiting), ("sinfo", states)):
            (self.place / ".new").write_text(text)
            (self.place / ".new").rename(self.place / name)

    async def run(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(self.program, env=self.env)

    async def pipes(self) -> list[str]:
        """Those that are there, once there is one."""
        for _ in range(int(LIMIT / 0.01)):
            if found := [name for name in left(self.starts) if not name.startswith(".")]:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("it does not wait")


async def test_job_with_all_nodes_ready_does_not_wait(tmp_path: Path) -> None:
    prolog = Prolog(tmp_path)
    prolog.says("7\n", "mix\nalloc\n")
    assert await asyncio.wait_for((await prolog.run()).wait(), LIMIT) == 0
    assert (tmp_path / "asked").read_text() == "-h -N -n cloud[1-2] -o %t\n"
    assert left(prolog.starts) == []


@cases("state", "alloc~", "alloc#", "idle%", "mix!")
async def test_job_waits_for_a_powering_up_node_until_the_service_starts_the_job(tmp_path: Path, state: str) -> None:
    prolog = Prolog(tmp_path)
    prolog.says("7\n", f"alloc\n{state}\n")
    running = await prolog.run()
    assert await prolog.pipes() == [f"7.{running.pid}"]
    starts = JobStarter(Slurm("7 cloud[1-2]\n", "cloud1 alloc\ncloud2 alloc\n").host, prolog.starts)
    await starts.step()
    assert await asyncio.wait_for(running.wait(), LIMIT) == 0
    assert left(prolog.starts) == []


@cases("waiting, states", ("6\n7\n", "alloc\nalloc\n"), ("77\n", "alloc#\n"), ids=["nodes there", "job gone"])
async def test_job_polls_by_itself_without_a_service(tmp_path: Path, waiting: str, states: str) -> None:
    prolog = Prolog(tmp_path, look="0.1")
    prolog.says("7\n", "alloc#\n")
    running = await prolog.run()
    await prolog.pipes()
    prolog.says(waiting, states)
    assert await asyncio.wait_for(running.wait(), LIMIT) == 0
    assert left(prolog.starts) == []


def test_job_starts_without_a_directory_to_wait_in(tmp_path: Path) -> None:
    prolog = Prolog(tmp_path)
    prolog.says("7\n", "alloc#\n")
    prolog.starts.rmdir()
    done = subprocess.run([prolog.program], env=prolog.env, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0
