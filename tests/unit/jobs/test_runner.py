"""The program on the nodes, run for real on this machine: logs, signals, how a rank ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for

from shoal.contract import EXIT_REQUEUE
from shoal.jobs.launchers import LAUNCHERS, LaunchParameters, ShellText
from shoal.remote import log_reader as reader
from shoal.remote import runner

PROGRAMS = Path(runner.__file__).parents[1]
RUNNER = str(PROGRAMS / "start.py")


class Node:
    """A job's directory and the variables that the batch script sets."""

    def __init__(self, place: Path, script: str) -> None:
        self.directory = place / "17"
        source = place / "script.py"
        source.write_text(script)
        with tarfile.open(place / "code.tar", "w") as tar:
            tar.add(source, "sub/script.py")
        self.env = {
            "PATH": os.environ["PATH"],
            "SHOAL_JOB_DIR": str(self.directory),
            "SHOAL_CODE": str(place / "code.tar"),
            "SHOAL_WORKDIR": "sub",
            "SHOAL_EXIT_REQUEUE": str(EXIT_REQUEUE),
            "PYTHONUNBUFFERED": "1",
            **{"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "1"},
            **{"SLURM_NTASKS": "2", "SLURMD_NODENAME": "n1"},
        }

    def start(self, *mode: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        mode = mode or ("rank", "--rank-from", "SLURM_PROCID")
        script = command or (sys.executable, "script.py")
        line = [sys.executable, "-I", "-S", RUNNER, *mode, "--", *script]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env=self.env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def ready(self, *mode: str, ranks: tuple[int, ...] = (1,), **more: Any) -> subprocess.Popen[str]:
        """Start, and wait until these ranks have printed `ready`."""
        process = self.start(*mode, **more)
        wait_for(lambda: all(self.text(f"rank-{rank}.0.log") == ["ready"] for rank in ranks))
        return process

    def let_go(self) -> None:
        """The script waits for a file `go`."""
        (self.directory / "tree" / "sub" / "go").touch()

    def run(self, *mode: str, command: tuple[str, ...] = ()) -> int:
        process = self.start(*mode, command=command)
        self.printed, _ = process.communicate(timeout=60)
        return process.returncode

    def text(self, name: str = "rank-1.0.log") -> list[str]:
        path = self.directory / name
        return [line.split(" ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []

    def end(self, name: str = "rank-1.0.end") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / name).read_text())
        return found


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], Node]:
    return lambda script: Node(tmp_path, script)


MakeNode = Callable[[str], Node]


def status(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=60)
    return process.returncode


def test_output_and_errors_are_logged_in_order_with_timestamps(node: MakeNode) -> None:
    made = node("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three', end='')")
    before = time.time()
    assert made.run() == 0 and made.text() == ["one", "two", "three"]
    assert (made.directory / "rank-1.0.node").read_text() == "n1\n"
    stamps = [float(line.split()[0]) for line in (made.directory / "rank-1.0.log").read_text().splitlines()]
    assert stamps == sorted(stamps) and before <= stamps[0] <= stamps[-1] <= time.time() and made.printed == ""


def test_torch_variables_are_set_under_every_launcher(node: MakeNode) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    made = node(f"import os\nprint([os.environ[name] for name in {names}])")
    made.run()
    assert made.text() == ["['1', '2', '1', '2', '0']"]
    # As Open MPI's daemon on the second of two nodes has them: Slurm's are those of the daemon.
    made.env.update({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "3"})
    made.env.update({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    made.run("rank", "--rank-from", "OMPI_COMM_WORLD_RANK")
    assert made.text("rank-3.0.log") == ["['3', '4', '1', '2', '1']"]


def test_script_starts_in_the_working_directory_of_its_own_tree(node: MakeNode) -> None:
    made = node("import os\nprint(os.getcwd())\nopen('left.txt', 'w')")
    made.run()
    assert made.text() == [f"{made.directory}/tree/sub"]
    made.env["SLURM_RESTART_COUNT"] = "1"
    made.run()
    assert (made.directory / "tree" / "sub" / "left.txt").exists(), "a restarted job finds what it left"
    assert made.text("rank-1.1.log") == made.text("rank-1.0.log")


def test_missing_bundle_is_logged(node: MakeNode) -> None:
    made = node("print('hello')")
    made.env["SHOAL_CODE"] = "/no/such/code.tar"
    assert made.run() == 127
    [line] = made.text()
    assert line.startswith("shoal: cannot start /no/such/code.tar: No such file or directory")


def test_rank_end_is_stored(node: MakeNode) -> None:
    made = node("import sys\nsys.exit(3)")
    assert made.run() == 3
    end = made.end()
    assert (end["rank"], end["node"], end["restart"], end["status"], end["out_of_memory"]) == (1, "n1", 0, 3, False)
    assert end["start"] <= end["end"]


def test_killed_rank_stores_its_signal(node: MakeNode) -> None:
    made = node("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert made.run() == 128 + signal.SIGSEGV and made.end()["status"] == -signal.SIGSEGV


def test_missing_program_is_logged(node: MakeNode) -> None:
    made = node("")
    assert made.run(command=("/no/such/python", "script.py")) == 127
    assert made.text() == ["shoal: cannot start /no/such/python: No such file or directory"]


def test_requeue_status_leaves_a_request_and_is_not_a_failure(node: MakeNode) -> None:
    made = node(f"import sys\nsys.exit({EXIT_REQUEUE})")
    assert made.run() == 0 and (made.directory / "requeue.0").read_text() == "1\n"
    assert made.end()["status"] == EXIT_REQUEUE


HANDLES = """
import signal, sys, time
def note(number, frame):
    print("got", signal.Signals(number).name)
    sys.exit(5)
signal.signal(signal.{0}, note)
print("ready")
time.sleep(60)
"""


@cases("name", "SIGUSR1", "SIGUSR2", "SIGTERM")
def test_signal_reaches_a_script_that_handles_signals(node: MakeNode, name: str) -> None:
    made = node(HANDLES.format(name))
    process = made.ready()
    process.send_signal(getattr(signal, name))
    assert status(process) == 5 and made.text() == ["ready", f"got {name}"] and made.end()["signals"] == [name]


def test_script_without_a_handler_survives_the_warning_signal(node: MakeNode) -> None:
    made = node("import sys, time, pathlib\nprint('ready')\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)")
    process = made.ready()
    process.send_signal(signal.SIGUSR1)
    made.let_go()
    assert status(process) == 0


def warn(process: subprocess.Popen[str], *names: str) -> None:
    """As the batch script does."""
    process.stdin.write("".join(f"{name}\n" for name in names))
    process.stdin.flush()


# As Lightning does: a handler only where there is none, and SIG_IGN counts as one.
AS_LIGHTNING = """
import signal, sys, time
if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(5))
print("ready")
time.sleep(60)
"""


@cases("mode", (), ("spawn", "--nproc", "2"))
def test_warning_reaches_a_script_that_sets_a_handler_only_over_the_default(
    node: MakeNode, mode: tuple[str, ...]
) -> None:
    made = node(AS_LIGHTNING)
    process = made.ready(*mode)
    warn(process, "USR1")
    assert status(process) == 5 and made.end()["signals"] == ["SIGUSR1"]


@cases("name", "USR1", "TERM", "HUP", "12", "NONSENSE")
def test_warning_leaves_a_script_alone_that_does_not_handle_it(node: MakeNode, name: str) -> None:
    made = node("import sys, time, pathlib\nprint('ready')\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)")
    process = made.ready()
    warn(process, name, "USR2")
    wait_for((made.directory / "stop.0").exists)  # the second one has come
    made.let_go()
    assert status(process) == 0 and made.end()["signals"] == []


def test_warning_waits_until_the_script_handles_it(node: MakeNode) -> None:
    made = node(
        "import pathlib, time\nprint('ready')\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        + HANDLES.format("SIGUSR1")
    )
    process = made.ready()
    warn(process, "USR1")
    wait_for((made.directory / "stop.0").exists)
    made.let_go()
    assert status(process) == 5


def test_warning_reaches_the_nearest_process_below_the_script_that_handles_it(node: MakeNode) -> None:
    """As under `accelerate launch`. A worker has its trainer's handler, and is left alone."""
    trainer = """
import os, signal, subprocess, sys, time
if len(sys.argv) == 1:
    sys.exit(subprocess.call([sys.executable, "script.py", "trainer"]))
signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, b"got it in %s\\n" % name))
name, worker = b"trainer", os.fork()
if not worker:
    name = b"worker"
os.write(1, b"ready\\n")
end = time.monotonic() + 60
while not os.path.exists("go") and time.monotonic() < end:
    time.sleep(0.05)
"""
    made = node(trainer)
    process = made.start()
    wait_for(lambda: made.text() == ["ready", "ready"])
    warn(process, "USR1")
    wait_for(lambda: len(made.text()) > 2)
    made.let_go()
    assert status(process) == 0 and made.text()[2:] == ["got it in trainer"]


def test_background_process_does_not_delay_the_end(node: MakeNode) -> None:
    made = node("import subprocess\nsubprocess.Popen(['sleep', '5'])\nprint('done')")
    assert made.run() == 0 and made.text() == ["done"]


def test_lines_are_also_printed_with_an_output_file(node: MakeNode) -> None:
    made = node("print('hello')")
    made.env["SHOAL_ECHO"] = "1"
    made.run()
    assert made.printed == "hello\n"


def test_directory_of_an_earlier_cluster_with_the_same_job_id_is_moved_aside(node: MakeNode) -> None:
    made = node("import os\nprint(sorted(os.listdir()))\nopen('checkpoint', 'w')")
    made.env["SHOAL_SUBMISSION"] = "a1"
    made.run()
    made.env["SLURM_RESTART_COUNT"] = "1"
    made.run()
    assert made.text("rank-1.1.log") == ["['checkpoint', 'script.py']"], "the same job, in another turn"
    made.env.update(SHOAL_SUBMISSION="b2", SLURM_RESTART_COUNT="0")
    made.run()
    assert made.text() == ["['script.py']"], "another job of the same number"
    aside = made.directory.with_name("17.before-b2")
    assert (aside / "tree" / "sub" / "checkpoint").exists() and (aside / "rank-1.1.log").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_directory_of_another_user_is_reported() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o1777)
        shutil.copy(RUNNER, place)
        shutil.copytree(PROGRAMS / "runner", place / "runner", ignore=shutil.ignore_patterns("__pycache__"))
        made = Node(place, "print('here')")
        line = ["/usr/bin/python3", "-I", "-S", name + "/start.py", "rank", "--rank-from", "SLURM_PROCID", "--", "true"]

        def run(user: int, submission: str) -> subprocess.CompletedProcess[str]:
            env = {**made.env, "SHOAL_SUBMISSION": submission, "SHOAL_WORKDIR": "."}
            return subprocess.run(line, env=env, user=user, capture_output=True, text=True, timeout=60)

        assert run(0, "a1").returncode == 0
        refused = run(65534, "b2")
        assert refused.returncode == 127
        assert refused.stderr == (
            f"shoal: error: cannot use {place}/17: an earlier job of this number left it, and it belongs to root:"
            " remove it, or use --directory\n"
        )
        shutil.rmtree(place / "17")
        assert run(65534, "b2").returncode == 0, "the lock of the other one is in nobody's way"


def test_concurrent_ranks_move_the_old_directory_aside_once(node: MakeNode) -> None:
    made = node("print('here')")
    made.directory.mkdir()
    (made.directory / "rank-9.0.log").write_text("1.0 old\n")
    made.env["SHOAL_SUBMISSION"] = "a1"
    started = []
    for rank in range(8):
        made.env["SLURM_PROCID"] = str(rank)
        started.append(made.start())
    assert [process.wait(timeout=60) for process in started] == [0] * 8
    for process in started:
        process.communicate()
    assert [made.text(f"rank-{rank}.0.log") for rank in range(8)] == [["here"]] * 8
    assert made.text("rank-9.0.log") == []


NSYS = """#!/bin/sh
for word; do echo "$word"; done > "$SHOAL_JOB_DIR/nsys.words"
echo trace > "$SHOAL_JOB_DIR/profile/rank-$RANK.0.nsys-rep"
while [ "$1" != "$PYTHON" ]; do shift; done
exec "$@"
"""


def test_nsys_wraps_the_rank_and_its_report_is_named(node: MakeNode, tmp_path: Path) -> None:
    """A stand-in for nsys: this is about its command line only."""
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    made = node("import sys\nprint('hello', sys.argv[1:])")
    made.env.update(SHOAL_PROFILE="nsys", PATH=f"{tmp_path}:{made.env['PATH']}", PYTHON=sys.executable)
    assert made.run(command=(sys.executable, "script.py", "two words")) == 0
    words = (made.directory / "nsys.words").read_text().splitlines()
    assert words[:6] == [
        *("profile", "--trace=cuda,nvtx,cudnn,cublas", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"),
        f"--output={made.directory}/profile/rank-%q{{RANK}}.0",
    ]
    assert words[-3:] == [sys.executable, "script.py", "two words"]
    assert made.text() == [
        "hello ['two words']",
        f"shoal: --profile nsys: n1:{made.directory}/profile/rank-1.0.nsys-rep",
    ]


@cases("name", "SIGUSR1", "SIGTERM")
def test_signal_reaches_the_script_under_nsys(node: MakeNode, tmp_path: Path, name: str) -> None:
    """As the real one does, the stand-in keeps signals to itself and starts the script in another session."""
    (tmp_path / "nsys").write_text(
        '#!/bin/sh\ntrap "" TERM USR1\nwhile [ "$1" != sh ]; do shift; done\nsetsid --wait "$@"\n'
    )
    (tmp_path / "nsys").chmod(0o755)
    made = node(HANDLES.format(name))
    made.env.update(SHOAL_PROFILE="nsys", PATH=f"{tmp_path}:{made.env['PATH']}")
    process = made.ready()
    process.send_signal(getattr(signal, name))
    assert status(process) == 5 and made.text()[1] == f"got {name}"


def test_missing_nsys_is_reported(node: MakeNode) -> None:
    made = node("print('hello')")
    made.env.update(SHOAL_PROFILE="nsys", PATH="/usr/bin:/bin")
    assert made.run() == 127 and made.text() == ["shoal: cannot start nsys: No such file or directory"]


def test_line_profiler_times_every_function_of_the_script(node: MakeNode) -> None:
    pytest.importorskip("line_profiler")
    made = node("import sys\ndef work():\n    return sum(range(1000))\nprint(work(), sys.argv)\n")
    made.env["SHOAL_PROFILE"] = "line"
    assert made.run(command=(sys.executable, "script.py", "--lr", "1")) == 0
    assert made.text()[0] == "499500 ['script.py', '--lr', '1']"
    report = made.directory / "profile" / "rank-1.0.txt"
    assert made.text()[-2:] == [
        f"shoal: --profile line: n1:{report.with_suffix('.lprof')}",
        f"shoal: --profile line: n1:{report}",
    ]
    assert "Function: work at line 2" in report.read_text() and "return sum(range(1000))" in report.read_text()


def test_missing_line_profiler_is_reported(node: MakeNode) -> None:
    made = node("print('hello')")
    made.env["SHOAL_PROFILE"] = "line"
    assert made.run(command=("/usr/bin/python3", "script.py")) == 1
    assert made.text() == ["/usr/bin/python3: No module named kernprof"]


def test_torch_profiler_writes_its_trace_to_the_logged_path(node: MakeNode) -> None:
    pytest.importorskip("torch")
    made = node("import torch\nprint(torch.ones(2).sum().item())")
    made.env["SHOAL_PROFILE"] = "torch"
    assert made.run() == 0
    trace = made.directory / "profile" / "rank-1.0.start.json.gz"
    assert trace.exists() and made.text()[-1] == f"shoal: --profile torch: n1:{trace}" and "2.0" in made.text()


def test_spawn_starts_the_ranks_of_its_node(node: MakeNode) -> None:
    made = node("import os\nprint(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))")
    made.env.update(SLURM_NODEID="1", SLURM_NNODES="2")
    assert made.run("spawn", "--nproc", "2") == 0
    assert (made.text("rank-2.0.log"), made.text("rank-3.0.log")) == (["2 0 4 1"], ["3 1 4 1"])


def test_first_failed_rank_ends_the_others_under_spawn(node: MakeNode) -> None:
    made = node("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(4)\ntime.sleep(60)")
    assert made.run("spawn", "--nproc", "2") == 4 and made.end("rank-0.0.end")["status"] == -signal.SIGTERM


def test_signal_reaches_every_rank_under_spawn(node: MakeNode) -> None:
    made = node(HANDLES.format("SIGUSR1").replace("sys.exit(5)", f"sys.exit({EXIT_REQUEUE})"))
    process = made.ready("spawn", "--nproc", "2", ranks=(0, 1))
    process.send_signal(signal.SIGUSR1)
    assert status(process) == 0 and (made.directory / "requeue.0").exists()


TORCHRUN = f"""
import os, signal, subprocess, sys
print({{name: os.environ[name] for name in ("PET_RDZV_CONF", "PET_LOCAL_ADDR", "PET_SIGNALS_TO_HANDLE")}})
line = [sys.executable, "-I", "-S", {RUNNER!r}, "rank", "--rank-from", "RANK", "--", sys.executable, "script.py"]
workers = [subprocess.Popen(line, env=dict(os.environ, RANK=str(r)), start_new_session=True) for r in range(2)]
sys.exit(max(worker.wait() for worker in workers))
"""


@cases("name", "SIGUSR1", "SIGTERM")
def test_signal_reaches_the_ranks_but_not_torchrun(node: MakeNode, name: str, tmp_path: Path) -> None:
    made = node(HANDLES.format(name).replace("sys.exit(5)", "sys.exit(0)"))
    launcher = tmp_path / "torchrun.py"
    launcher.write_text(TORCHRUN)
    process = made.ready("agent", command=(sys.executable, str(launcher)), ranks=(0, 1))
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert "'PET_RDZV_CONF': 'is_host=true', 'PET_LOCAL_ADDR': 'n1'" in printed
    assert made.text("rank-1.0.log") == ["ready", f"got {name}"]


def test_warning_reaches_the_ranks_of_torchrun(node: MakeNode, tmp_path: Path) -> None:
    made = node(AS_LIGHTNING)
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    process = made.ready("agent", command=(sys.executable, str(tmp_path / "torchrun.py")), ranks=(0, 1))
    warn(process, "USR1")
    assert status(process) == 5


REAL = f"""
import signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
stop = []
signal.signal(signal.SIGUSR1, lambda number, frame: stop.append(number))
print("in", dist.get_rank(), dist.get_world_size())
while not stop:
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
print("saved")
sys.exit({EXIT_REQUEUE})
"""


def test_torchrun_on_two_nodes_lets_its_workers_save_after_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = [Node(tmp_path, REAL), Node(tmp_path, REAL)]
    started = []
    for number, node in enumerate(nodes):
        node.env.update(SLURM_NODEID=str(number), SLURM_NNODES="2", SLURM_NTASKS="2", SLURMD_NODENAME="localhost")
        node.env.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SHOAL_JOB="17")
        command = (sys.executable, "script.py")
        launch = LaunchParameters(sys.executable, 2, 1, ShellText(RUNNER), command, sys.executable)
        words = [
            (word.text if isinstance(word, ShellText) else word).replace(
                "$MASTER_ADDR:$MASTER_PORT", f"127.0.0.1:{port}"
            )
            for word in LAUNCHERS["torchrun"].command(launch)
        ]
        line = [word.replace('"', "") for word in words]
        started.append(
            subprocess.Popen(line, env=node.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    logs = ("rank-0.0.log", "rank-1.0.log")
    wait_for(lambda: all(any(line.startswith("in ") for line in nodes[0].text(name)) for name in logs), 240)
    started[0].send_signal(signal.SIGUSR1)  # both agents are on this machine, so one reaches the ranks of both
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert [nodes[0].end(name.replace(".log", ".end"))["status"] for name in logs] == [EXIT_REQUEUE] * 2
    assert (nodes[0].directory / "requeue.0").exists()


def test_node_programs_import_only_the_standard_library() -> None:
    ours = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import runner.rank, runner.launch"
    for program in (ours, f"import runpy; runpy.run_path({reader.__file__!r}, run_name='x')"):
        assert subprocess.run([sys.executable, "-I", "-S", "-c", program]).returncode == 0
