"""`shoal run --now`: the srun that it starts, what it shows, and that the job ends with it."""

import asyncio
import contextlib
import io
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, job, resolved
from tests.unit.jobs.test_job_verbs import Reef
from tests.unit.jobs.test_runner import Node

from shoal.contract import EXIT_REQUEUE
from shoal.errors import SlurmError, UsageError
from shoal.jobs.logs import BATCH, LogLine
from shoal.jobs.srun_command import require_no_batch_options, require_tasks_alone, srun_command
from shoal.remote import program_text
from shoal.remote.runner.node import ECHO_BAR, ECHO_JOB, ECHO_LINE, ECHO_RANKS
from shoal.verbs.run_now import EndedJob, run_now, show_command
from shoal_simulators.fake_host import FakeProgram

SHELL = ("sh", "-c", program_text("job_now.sh"))


class Screen:
    """What a person sees."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.start: tuple[str, str] | None = None
        self.lines: list[tuple[int, str]] = []
        self.bars: list[list[tuple[int, str]]] = []
        self.messages: list[str] = []

    def show_start(self, job: str, nodes: str) -> None:
        self.start = (job, nodes)
        self.started.set()

    def show_line(self, line: LogLine) -> None:
        self.lines.append((line.rank, line.text))

    def show_bars(self, lines: Iterable[LogLine]) -> None:
        self.bars.append([(line.rank, line.text) for line in lines])

    def show_message(self, text: str) -> None:
        self.messages.append(text)


async def run_on(reef: Reef, tree: Path, screen: Screen, **options: Any) -> EndedJob:
    return await run_now(reef.context, job(nodes=2, **options), tree, screen)


@cases(
    "name, options, paths",
    ("now", {"nodes": 2, "sbatch": ("--reservation=a b",), "export": {"LEVEL": "2"}}, {"copies": True}),
    ("now-carried", {"nodes": 2, "launcher": "torchrun"}, {"carried": True, "code_root": "/var/lib/code"}),
)
def test_command_matches_its_golden(name: str, options: dict[str, Any], paths: dict[str, Any]) -> None:
    *words, text = srun_command(resolved(**options), replace(SHIPPED, **paths))
    text = text.replace(shlex.quote(program_text("job_directory")), "PROGRAM")
    assert_golden(f"jobs/{name}.srun", "\n".join([*words, text]) + "\n")
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_own_rendezvous_of_the_user_is_left_alone() -> None:
    text = srun_command(resolved(nodes=2, export={"MASTER_PORT": "1234"}), SHIPPED)[-1]
    assert text.count("export MASTER_PORT=") == 2 and text.rindex("MASTER_PORT=1234") > text.index("MASTER_PORT=$((")


@cases(
    "options, expected",
    ({"array": "0-3"}, "--now cannot have --array"),
    ({"dependency": "afterok:17"}, "--now cannot have --dependency"),
    ({"requeue": True}, "--now cannot have --requeue"),
    ({"signal": "USR1@120"}, "--now cannot have --signal"),
    ({"output": "x.log"}, "--now cannot have --output"),
    ({"error": "x.log"}, "--now cannot have --error"),
    ({"launcher": "mpirun"}, "--now cannot have --launcher mpirun"),
)
async def test_options_of_batch_jobs_are_rejected_before_anything_is_asked(
    tree: Path, options: dict[str, Any], expected: str
) -> None:
    reef = Reef()
    with pytest.raises(UsageError, match=expected):
        await run_on(reef, tree, Screen(), **options)
    assert reef.controller.calls == []


def test_no_requeue_is_what_it_does_anyway() -> None:
    require_no_batch_options(job(requeue=False))


def test_nodes_that_only_a_batch_script_prepares_are_rejected() -> None:
    with pytest.raises(UsageError, match="rented containers"):
        require_tasks_alone(replace(resolved(), containers=("box1",)), SHIPPED)
    with pytest.raises(UsageError, match="root is another user there"):
        require_tasks_alone(resolved(), replace(SHIPPED, owner=65534))


async def test_output_is_shown_as_it_comes_and_the_status_is_that_of_srun(tree: Path) -> None:
    reef, screen = Reef(), Screen()

    async def srun(program: FakeProgram) -> int:
        assert not program.call.root, "the job is the login user's, not root's"
        while (await program.readline()).strip():
            pass
        await program.print(b"srun: job 17 queued and waiting for resources\n")
        await program.print(f"{ECHO_JOB}17 n[1-2]\n{ECHO_LINE}1 one\n{ECHO_BAR}0 10%\nof a launcher\n".encode())
        await program.print(f"{ECHO_BAR}0 \n{ECHO_LINE}0 done: 3 \x1b[31m\n".encode())
        return 3

    reef.controller.answers = {**reef.controller.answers, SHELL: srun}
    ended = await run_on(reef, tree, screen)
    assert (ended.status, ended.job.id, screen.start) == (3, "17", ("17", "n[1-2]"))
    assert screen.lines == [(1, "one"), (BATCH, "of a launcher"), (0, "done: 3 \x1b[31m")]
    assert [(0, "10%")] in screen.bars and screen.bars[-1] == []
    assert screen.messages == ["srun: job 17 queued and waiting for resources"]
    call = next(call for call in reef.controller.calls if call.argv[:3] == SHELL)
    assert call.argv[4:6] == ("0", "srun") and "--nodes=2" in call.argv
    assert reef.sent()["n1"] and reef.submitted == {}, "the code is on the nodes, and sbatch was not called"


async def test_job_that_srun_rejects_is_an_error_with_its_words(tree: Path) -> None:
    reef = Reef()
    answer = b"srun: error: Unable to allocate resources: Requested node configuration is not available\n"

    async def srun(program: FakeProgram) -> int:
        await program.print(answer)
        return 1

    reef.controller.answers = {**reef.controller.answers, SHELL: srun}
    with pytest.raises(SlurmError, match="did not start the job: Unable to allocate resources: Requested node"):
        await run_on(reef, tree, Screen())


@cases("started", True, False)
async def test_ctrl_c_cancels_the_job(tree: Path, started: bool) -> None:
    reef, screen, waits = Reef(), Screen(), asyncio.Event()

    async def srun(program: FakeProgram) -> int:
        if started:
            await program.print(f"{ECHO_JOB}17 n[1-2]\n".encode())
        waits.set()
        if started:
            while ("scancel", "17") not in reef.controller.argvs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await program.print(f"{ECHO_LINE}0 saved\n".encode())
        else:
            await program.read()  # the end of its input ends it
        return 143

    reef.controller.answers = {**reef.controller.answers, SHELL: srun}
    task = asyncio.create_task(run_on(reef, tree, screen))
    await (screen.started if started else waits).wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (("scancel", "17") in reef.controller.argvs) is started
    assert screen.lines == ([(0, "saved")] if started else [])


async def test_dry_run_shows_the_command_and_touches_no_node(tree: Path) -> None:
    reef = Reef()
    command = await show_command(reef.context, job(nodes=2), tree)
    assert command[0] == "srun" and "train.py" in command[-1]
    assert all(host.calls == [] for host in reef.nodes.values())


def start_shell(tmp_path: Path, program: str, code: bytes = b"") -> subprocess.Popen[bytes]:
    """`job_now.sh` for real, with a program of ours as srun."""
    line = [*SHELL, "sh", str(len(code)), "sh", "-c", program]
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment)
    assert process.stdin is not None
    process.stdin.write(b"SECRET=it's $5\nLEVEL=2\n\n" + code)
    process.stdin.flush()
    return process


def test_srun_gets_variables_code_and_its_status_is_passed_on(tmp_path: Path) -> None:
    code = bytes(range(256)) * 1000
    program = 'printf "%s\\n" "$SECRET$LEVEL"; wc -c; echo problem >&2; exit 7'
    with start_shell(tmp_path, program, code) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"it's $52\n256000\nproblem\n", "and the end of our input was not needed"
        assert process.wait(60) == 7
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_it_outlives_srun(tmp_path: Path) -> None:
    """The connection stays open until then: a program that held it would keep `shoal run --now` waiting."""
    with start_shell(tmp_path, "sleep 1") as process:
        assert process.stdin is not None
        assert process.wait(60) == 0
        with pytest.raises(BrokenPipeError):
            for _ in range(1000):
                process.stdin.write(b"x" * 65536)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def test_end_of_the_connection_ends_srun(tmp_path: Path) -> None:
    with start_shell(tmp_path, "trap 'echo ended; exit 9' TERM; echo runs; sleep 600 & wait") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"runs\n"
        process.stdin.close()
        assert process.stdout.readline() == b"ended\n"
        assert process.wait(60) == 9


def test_rank_prints_its_lines_behind_its_number(tmp_path: Path) -> None:
    script = "import sys, time\nprint('one')\nprint('half', end='', flush=True)\ntime.sleep(1.5)\nprint(' line')\n"
    node = Node(tmp_path, script + f"sys.exit({EXIT_REQUEUE})\n")
    node.env.update(SHOAL_ECHO=ECHO_RANKS, SHOAL_EXIT_REQUEUE="999")
    assert node.run() == EXIT_REQUEUE, "nobody requeues the job, so the status is the script's"
    assert node.printed.splitlines()[:2] == [f"{ECHO_LINE}1 one", f"{ECHO_BAR}1 half"]
    assert f"{ECHO_LINE}1 half line" in node.printed and f"{ECHO_BAR}1 \n" in node.printed
    assert node.text() == ["one", "half line"]


def test_code_that_comes_on_the_standard_input_is_received(tmp_path: Path) -> None:
    from shoal.jobs.bundle import runtime, working_tree
    from shoal.jobs.delivery import pack_code

    (tmp_path / "train.py").write_text("print(1)\n")
    tree, library = working_tree(tmp_path, "train.py"), runtime()
    packed = pack_code(tree, library)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        assert tar.getnames() == ["program.py", "code.tar", "lib.tar"]
    root = tmp_path / "jobs"
    command = [sys.executable, "-I", "-S", "-B", "-c", program_text("job_directory"), "receive", str(root)]
    done = subprocess.run([*command, tree.hash, library.hash], input=packed, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (root / "code" / f"{tree.hash}.tar").read_bytes() == tree.data
