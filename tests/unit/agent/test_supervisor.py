"""Services on a host without systemd: a plain supervisor keeps them up.

The program runs in a mount namespace of its own, with empty directories in the place of those it writes to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_place import Place

from shoal.agent.client import AgentSession
from shoal.agent.document import Service
from shoal.agent.program import process_start
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal.hosts.process import LineProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SETUP = """
mount -t tmpfs tmpfs /run && mkdir -p "$1/log" "$1/run" "$1/cron" /run/shoal /var/log/shoal /etc/cron.d || exit 1
mount --bind "$1/run" /run/shoal && mount --bind "$1/log" /var/log/shoal && mount --bind "$1/cron" /etc/cron.d || exit 1
shift
exec "$@"
"""


class WithoutSystemd(LocalHost):
    def __init__(self, folder: Path) -> None:
        super().__init__(Target("here"))
        self.folder = folder

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SETUP, "sh", str(self.folder)]
        return await super().start([*prefix, *argv], root=root)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = not Path("/var/log/shoal").exists()  # noqa: ASYNC240 - a test has nothing else to wait for
    async with await AgentSession.open(WithoutSystemd(tmp_path), state=str(tmp_path / "state")) as opened:
        yield Place(tmp_path, opened)
        await opened.apply((Service("d", running=False),), {}, lambda event: None)
    if made:
        os.rmdir("/var/log/shoal")


def record(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / "run/supervise/d.json").read_text())
    return found


SLEEP = ("sh", "-c", "echo up; exec sleep 1000")


async def test_a_service_is_started_kept_and_not_started_twice(place: Place) -> None:
    item = Service("d", command=SLEEP)
    assert (await place.check(item))[0].action == "start d under a supervisor"
    assert (await place.apply(item))[0].status == "changed"
    first = record(place)["child"]
    assert (await place.apply(item))[0].status == "ok"
    assert record(place)["child"] == first
    assert (place.folder / "log/d.log").read_text() == "up\n"
    assert (await place.session.facts()).services == {}


async def test_a_daemon_that_dies_is_started_again(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    first = record(place)["child"]
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(30):
        while record(place)["child"] == first:  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)
    os.kill(record(place)["child"], 0)


async def test_another_command_and_a_changed_file_restart_it(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    pids = [record(place)["pid"]]
    assert (await place.apply(Service("d", command=("sleep", "2000"))))[0].action == "restart d"
    pids.append(record(place)["pid"])
    await place.apply(place.file("d.conf", "x", restarts=("d",)), Service("d", command=("sleep", "2000")))
    pids.append(record(place)["pid"])
    assert len(set(pids)) == 3


async def test_a_stopped_service_leaves_no_process_and_no_record(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    found = record(place)
    assert [(await place.apply(Service("d", running=False)))[0].status for _ in range(2)] == ["changed", "ok"]
    assert [process_start(found[name]) for name in ("pid", "child")] == ["", ""]
    assert os.listdir(place.folder / "run/supervise") == os.listdir(place.folder / "cron") == []


async def test_it_comes_back_with_a_reboot_where_there_is_cron(place: Place) -> None:
    await place.apply(Service("d", command=("sh", "-c", "date +%s; sleep 1000")))
    line = (place.folder / "cron/shoal-d").read_text()
    assert line.startswith("@reboot root ") and line.endswith("supervise d sh -c 'date +\\%s; sleep 1000'\n")


async def test_a_daemon_that_does_not_stay_up_fails_with_its_last_words(place: Place) -> None:
    (found,) = await place.apply(Service("d", command=("sh", "-c", "echo cannot bind; exit 1")))
    assert found.detail == "d started under the supervisor and did not stay up\ncannot bind"


async def test_a_service_without_a_command_is_refused_with_the_cause(place: Place) -> None:
    (found,) = await place.apply(Service("d"))
    assert found.detail == "this host has no systemd, and no command is known for d; use a host with systemd"
