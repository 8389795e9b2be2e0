"""The program that lets no job start while keys change, run in a real shell with stand-ins for Slurm's commands."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.plan.rotation import PAUSE_COMMAND

SINFO = "#!/bin/sh\nprintf 'main up\\nmain up\\nold down\\nspot up\\n'\n"
SCONTROL = '#!/bin/sh\necho "$2 $3" >> {place}/heard\n'
DOWN = ["partitionname=main state=down", "partitionname=spot state=down"]
UP = ["partitionname=main state=up", "partitionname=spot state=up"]
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program, with `timeout_s` seconds in place of its two minutes."""
    for name, text in {"sinfo": SINFO, "scontrol": SCONTROL.format(place=tmp_path)}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    begun: list[subprocess.Popen[str]] = []

    def begin(timeout_s: str = "120") -> subprocess.Popen[str]:
        line = [word.replace("-t 120", f"-t {timeout_s}") for word in PAUSE_COMMAND]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        begun.append(subprocess.Popen(line, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        with process:  # closes its pipes
            process.wait()


def heard(place: Path) -> list[str]:
    return (place / "heard").read_text().splitlines()


def test_partitions_go_down_and_up_again_on_request(start: Start, tmp_path: Path) -> None:
    process = start("120")
    assert process.stdout.readline() == "paused\n" and heard(tmp_path) == DOWN
    said, _ = process.communicate("\n", timeout=120)
    assert said == "resumed\n" and heard(tmp_path) == DOWN + UP


def test_partitions_come_up_when_the_caller_disconnects_or_after_the_timeout(start: Start, tmp_path: Path) -> None:
    process = start("120")
    assert process.stdout.readline() == "paused\n"
    process.stdin.close()
    assert process.wait(timeout=120) == 0 and heard(tmp_path) == DOWN + UP
    assert start("1").wait(timeout=120) == 0 and heard(tmp_path) == (DOWN + UP) * 2
