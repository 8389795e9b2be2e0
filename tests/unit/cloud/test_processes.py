"""Programs that the service starts: their output is read, and none outlives its caller."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.cloud.service.processes import ProcessResult, run, run_connected


async def test_stdout_is_the_answer_and_stderr_the_problem() -> None:
    assert await run(["sh", "-c", "echo yes; echo warning >&2"]) == ProcessResult(0, "yes\n")
    refused = await run(["sh", "-c", "echo no >&2; echo 'such luck' >&2; exit 3"])
    assert (refused, refused.problem) == (ProcessResult(3, "no such luck"), "no such luck")
    assert (await run(["sh", "-c", "exit 4"])).problem == "exit status 4"


async def test_connected_processes_exchange_their_output() -> None:
    first = ["sh", "-c", 'read -r said; echo "heard $said"; read -r end || exit 0']
    second = ["sh", "-c", 'echo one; exec >&-; read -r said; [ "$said" = "heard one" ]']
    assert await run_connected(first, second) == (ProcessResult(0), ProcessResult(0))


@cases("failing", 0, 1)
async def test_failure_of_a_process_ends_its_partner(failing: int) -> None:
    pair = [["sleep", "600"], ["sleep", "600"]]
    pair[failing] = ["sh", "-c", "echo broken >&2; exit 5"]
    ends = await asyncio.wait_for(run_connected(*pair), 60)
    assert ends[failing] == ProcessResult(5, "broken")
    assert ends[1 - failing].status != 0


async def test_cancelled_wait_leaves_no_process(tmp_path: Path) -> None:
    line = ["sh", "-c", 'echo $$ > "$0"; exec sleep 600']
    waiting = asyncio.create_task(run_connected([*line, str(tmp_path / "a")], [*line, str(tmp_path / "b")]))
    async with asyncio.timeout(60):
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "ab"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)
