"""Services on a host without systemd: a plain supervisor keeps them up.

The program runs in its own mount namespace, with empty directories in place of those it writes to.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_place import Apart, Place

from shoal.agent.client import AgentSession
from shoal.agent.document import Command, Service
from shoal.remote.agent.supervise import process_start

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SETUP = """
mount -t tmpfs tmpfs /run && mkdir -p "$1/log" "$1/run" "$1/cron" /run/shoal /var/log/shoal /etc/cron.d || exit 1
mount --bind "$1/run" /run/shoal && mount --bind "$1/log" /var/log/shoal && mount --bind "$1/cron" /etc/cron.d || exit 1
shift
exec "$@"
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = not Path("/var/log/shoal").exists()  # noqa: ASYNC240 - a test has nothing else to wait for
    async with await AgentSession.open(Apart(tmp_path, SETUP), state=str(tmp_path / "state")) as opened:
        yield Place(tmp_path, opened)
        await opened.apply((Service("d", running=False),), {}, lambda event: None)
    if made:
        os.rmdir("/var/log/shoal")


def record(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / "run/supervise/d.json").read_text())
    return found


SLEEP = ("sh", "-c", "echo up; exec sleep 1000")


async def test_service_is_started_once_and_kept_running(place: Place) -> None:
    item = Service("d", command=SLEEP)
    assert (await place.check(item))[0].action == "start d under a supervisor"
    assert (await place.apply(item))[0].status == "changed"
    first = record(place)["child"]
    assert (await place.apply(item))[0].status == "ok" and record(place)["child"] == first
    assert (place.folder / "log/d.log").read_text() == "up\n" and (await place.session.facts()).services == {}


async def test_daemon_that_dies_is_restarted(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    first = record(place)["child"]
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(30):
        while record(place)["child"] == first:  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)
    os.kill(record(place)["child"], 0)


async def test_changed_command_and_changed_file_restart_the_service(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    pids = [record(place)["pid"]]
    assert (await place.apply(Service("d", command=("sleep", "2000"))))[0].action == "restart d"
    pids.append(record(place)["pid"])
    await place.apply(place.file("d.conf", "x", restarts=("d",)), Service("d", command=("sleep", "2000")))
    pids.append(record(place)["pid"])
    assert len(set(pids)) == 3


async def test_stopped_service_leaves_no_process_and_no_record(place: Place) -> None:
    await place.apply(Service("d", command=SLEEP))
    found = record(place)
    assert [(await place.apply(Service("d", running=False)))[0].status for _ in range(2)] == ["changed", "ok"]
    assert [process_start(found[name]) for name in ("pid", "child")] == ["", ""]
    assert os.listdir(place.folder / "run/supervise") == os.listdir(place.folder / "cron") == []


async def test_service_starts_at_boot_by_cron(place: Place) -> None:
    await place.apply(Service("d", command=("sh", "-c", "date +%s; exec sleep 1000")))
    line = (place.folder / "cron/shoal-d").read_text()
    assert line.startswith("@reboot root ") and line.endswith("supervise.py d sh -c 'date +\\%s; exec sleep 1000'\n")


async def test_daemon_that_does_not_stay_up_fails_with_its_log(place: Place) -> None:
    (found,) = await place.apply(Service("d", command=("sh", "-c", "echo cannot bind; exit 1")))
    assert found.detail == "d started under the supervisor and did not stay up\ncannot bind"


async def test_daemon_that_fails_after_a_slow_start_is_reported(place: Place) -> None:
    long = "python3 -c 'import time; end = time.process_time() + 1\nwhile time.process_time() < end: pass'"
    (found,) = await place.apply(Service("d", command=("sh", "-c", f"{long}; echo cannot bind; exit 1")))
    assert found.detail == "d started under the supervisor and did not stay up\ncannot bind"


async def test_service_without_a_command_is_rejected_with_the_cause(place: Place) -> None:
    (found,) = await place.apply(Service("d"))
    assert found.detail == "this host has no systemd, and no command is known for d; use a host with systemd"


def careful(place: Place, name: str = "d.conf") -> Service:
    """A daemon that does not start on a file with a bad word in it."""
    path = place.path(name)
    complain = f"grep Bad {path} | sed 's/^/fatal: unknown key /'"
    return Service("d", command=("sh", "-c", f"{complain}; grep -q Bad {path} || exec sleep 1000"))


async def test_service_that_fails_with_a_new_file_gets_the_old_file_back(place: Place) -> None:
    good = place.file("d.conf", "Good=1\n", restarts=("d",), mode=0o640)
    assert [item.status for item in await place.apply(good, careful(place))] == ["changed", "changed"]
    more = {"restarts": ("d",), "reloads": ("command tell",), "advice": (("Bad", "delete options.Bad"),)}
    bad = place.file("d.conf", "Bad=1\n", **more)
    tell = Command("tell", ("touch", place.path("told")), on_change=True)
    written, failed, skipped = await place.apply(bad, careful(place), tell)
    assert [written.status, failed.status, skipped.status] == ["changed", "failed", "skipped"]
    assert failed.detail == (
        f"d did not start with the new {place.path('d.conf')}: fatal: unknown key Bad=1\n"
        "The old file is back in force, and d runs"
    )
    assert failed.fix == "delete options.Bad"
    conf = place.folder / "d.conf"
    assert conf.read_text() == "Good=1\n" and conf.stat().st_mode & 0o777 == 0o640
    assert process_start(record(place)["child"])
    again = await place.apply(good, careful(place), tell)
    assert [item.status for item in again] == ["ok", "ok", "ok"], "nothing is left due"


async def test_rollback_removes_files_that_did_not_exist_before(place: Place) -> None:
    good = place.file("d.conf", "Good=1\n", restarts=("d",))
    await place.apply(good, careful(place))
    news = (place.file("d.conf", "Bad=1\n", restarts=("d",)), place.file("more.conf", "x", restarts=("d",)))
    *_, failed = await place.apply(*news, careful(place))
    assert failed.detail.endswith("The old files are back in force, and d runs")
    assert not (place.folder / "more.conf").exists()


async def test_service_not_running_before_keeps_the_new_file_and_reports_the_error(place: Place) -> None:
    bad = place.file("d.conf", "Bad=1\n", restarts=("d",), advice=(("Bad", "delete options.Bad"),))
    _, failed = await place.apply(bad, careful(place))
    assert failed.detail == (
        "d started under the supervisor and did not stay up\nfatal: unknown key Bad=1\nfatal: unknown key Bad=1"
    )
    assert failed.fix == "delete options.Bad" and (place.folder / "d.conf").read_text() == "Bad=1\n"


async def test_service_that_starts_with_neither_file_reports_both_errors(place: Place) -> None:
    await place.apply(place.file("d.conf", "Good=1\n", restarts=("d",)), careful(place))
    broken = Service("d", command=("sh", "-c", "echo error: out of luck; exit 1"))
    _, failed = await place.apply(place.file("d.conf", "Bad=1\n", restarts=("d",)), broken)
    assert failed.status == "failed"
    assert f"Nor does it start with the old {place.path('d.conf')}: d started under the supervisor" in failed.detail
