"""Every kind of item, applied by the real agent over SSH on a real host: applied, checked, applied again, removed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from tests.e2e.existing_hosts import Lent, lent_hosts

from shoal.agent.client import AgentSession, FactsRequest, ItemEvent, ItemResult
from shoal.agent.document import (
    Block,
    Command,
    DeviceRule,
    Directory,
    Document,
    File,
    Group,
    Item,
    Mount,
    Packages,
    Service,
    User,
)
from shoal.errors import AgentFailed
from shoal.hosts.api import Host, Process, Result, Target
from shoal.hosts.ssh import SshConnector
from shoal.spec.member import Shape

COVERS = "agent remote/agent hosts"
pytestmark = pytest.mark.sandbox

AGENT = "pgrep -f '^python3 -I -S -B -c'"


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    with lent_hosts("x-items", {"n1": Shape(memory_mb=512, gpus=1)}) as made:
        yield made


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


def quiet(event: ItemEvent) -> None: ...


async def apply(lent: Lent, known: Path, *document: Item) -> list[ItemResult]:
    """Apply a document in a session of its own."""
    async with await connect(lent, known) as host, await AgentSession.open(host) as agent:
        report = await agent.apply(document, {}, quiet)
    return list(report.items)


async def connect(lent: Lent, known: Path) -> Host:
    return await SshConnector(known).connect(lent.instances["n1"].target)


async def applied_once(lent: Lent, known: Path, *document: Item) -> list[str]:
    """Apply a document of which everything changes; then it is as asked, and applying it again does nothing."""
    async with await connect(lent, known) as host, await AgentSession.open(host) as agent:
        planned = await agent.check(document)
        assert {item.status for item in planned.items} == {"change"}, planned
        first = await agent.apply(document, {}, quiet)
        assert {item.status for item in first.items} == {"changed"}, first
        assert [item.action for item in first.items] == [item.action for item in planned.items]
        checked = await agent.check(document)
        assert {item.status for item in checked.items} == {"ok"}, checked
        again = await agent.apply(document, {}, quiet)
        assert {item.status for item in again.items} == {"ok"} and not again.changed, again
        return [item.action for item in first.items]


# ---------------------------------------------------------------- accounts, files, kernel, mounts, commands


async def test_groups_and_users_get_their_fixed_ids(lent: Lent, known: Path) -> None:
    actions = await applied_once(
        lent,
        known,
        Group("crew", 4100),
        User("fisher", 4101, "crew", "/var/lib/fisher", "/bin/sh", groups=("video",)),
    )
    assert actions == ["create group crew with id 4100", "create user fisher with id 4101"]
    assert lent.shell("n1", "getent passwd fisher").strip() == "fisher:x:4101:4100::/var/lib/fisher:/bin/sh"
    assert "fisher" in lent.shell("n1", "getent group video")

    moved = await applied_once(
        lent,
        known,
        Group("crew", 4200),
        User("fisher", 4201, group="crew", home="/home/fisher", groups=("video", "audio")),
    )
    assert moved[0] == "change the id of group crew from 4100 to 4200"
    ids = lent.shell("n1", "id -u fisher; id -g fisher; id -Gn fisher").split()
    assert ids[:2] == ["4201", "4200"] and sorted(ids[2:]) == ["audio", "crew", "video"]


async def test_conflicting_id_is_reported_with_its_owner(lent: Lent, known: Path) -> None:
    failed, skipped = await apply(lent, known, Group("other", 8), User("other", 5000, group="other"))
    assert failed.detail.startswith("the id 8 wanted for group other belongs to group mail on this host; give mail")
    assert skipped.status == "skipped" and skipped.detail == "after the failure of group other"


async def test_files_directories_and_blocks_are_added_and_removed(lent: Lent, known: Path) -> None:
    lent.shell("n1", "printf 'first\\nlast without newline' > /etc/shared")
    there: Document = (
        Directory("/srv/net/knots", owner="daemon", group="daemon", mode=0o750),
        File("/srv/net/knots/list", "reef\nbowline\n", owner="daemon", mode=0o640),
        Block("/etc/shared", "knots", "reef"),
    )
    await applied_once(lent, known, *there)
    look = "stat -c '%U:%G %a' /srv/net/knots /srv/net/knots/list; cat /srv/net/knots/list"
    assert lent.shell("n1", look).split() == ["daemon:daemon", "750", "daemon:root", "640", "reef", "bowline"]
    with_block = "first\nlast without newline\n# BEGIN shoal knots\nreef\n# END shoal knots\n"
    assert lent.shell("n1", "cat /etc/shared") == with_block
    await applied_once(lent, known, File("/srv/net/knots/list"), Block("/etc/shared", "knots", ""))
    assert lent.shell("n1", "ls /srv/net/knots; cat /etc/shared") == "first\nlast without newline\n"


async def test_mount_survives_a_reboot_and_can_be_removed(lent: Lent, known: Path) -> None:
    scratch = Mount("/srv/scratch-1", "none", "tmpfs", "size=1m,mode=1777")
    await applied_once(lent, known, scratch)
    assert "size=1024k" in lent.shell("n1", "grep ' /srv/scratch-1 tmpfs ' /proc/mounts")
    unit = "srv-scratch\\x2d1.mount"
    assert lent.shell("n1", f"systemctl is-enabled '{unit}'").strip() == "enabled"
    await applied_once(lent, known, Mount("/srv/scratch-1", "none", "tmpfs", "size=2m,mode=1777"))
    assert "size=2048k" in lent.shell("n1", "grep ' /srv/scratch-1 tmpfs ' /proc/mounts")
    await applied_once(lent, known, Mount("/srv/scratch-1", mounted=False))
    assert lent.shell("n1", "grep scratch /proc/mounts; ls /etc/systemd/system | grep scratch; true") == ""


async def test_busy_mount_is_reported_with_the_command_that_lists_its_users(lent: Lent, known: Path) -> None:
    await apply(lent, known, Mount("/srv/busy", "none", "tmpfs"))
    sit = "systemd-run --quiet --unit=sitter -p Type=exec -p WorkingDirectory=/srv/busy sleep infinity"
    lent.shell("n1", sit)
    [failed] = await apply(lent, known, Mount("/srv/busy", mounted=False))
    assert failed.status == "failed" and "fuser -vm /srv/busy" in failed.detail, failed
    lent.shell("n1", "systemctl stop sitter")
    [done] = await apply(lent, known, Mount("/srv/busy", mounted=False))
    assert done.status == "changed"


async def test_device_rule_is_added_and_removed_on_a_host_without_udev(lent: Lent, known: Path) -> None:
    rule = DeviceRule("90-test", 'KERNEL=="nvidia[0-9]*", MODE="0666"\n')
    assert await applied_once(lent, known, rule) == ["create /etc/udev/rules.d/90-test.rules"]
    assert "0666" in lent.shell("n1", "cat /etc/udev/rules.d/90-test.rules")
    assert await applied_once(lent, known, DeviceRule("90-test", "")) == ["remove /etc/udev/rules.d/90-test.rules"]
    assert lent.shell("n1", "ls /etc/udev/rules.d/90-test.rules", status=2) == ""


async def test_commands_run_by_their_guard_and_when_a_file_changes(lent: Lent, known: Path) -> None:
    guarded = Command("once", ("touch", "/run/once"), unless=("test", "-e", "/run/once"))
    await applied_once(lent, known, guarded)

    def told(text: str) -> Document:
        count = Command("count", ("sh", "-c", "cat >> /run/count"), on_change=True, stdin="x")
        return File("/run/told", text, reloads=("command count",)), count

    for text, expected in (("a", "x"), ("a", "x"), ("b", "xx")):
        await apply(lent, known, *told(text))
        assert lent.shell("n1", "cat /run/count") == expected
    [failed] = await apply(lent, known, Command("bad", ("sh", "-c", "echo broken; exit 3")))
    assert failed.detail == "bad ended with status 3\nbroken"


async def test_packages_are_installed_once_and_their_daemons_stay_down(lent: Lent, known: Path) -> None:
    actions = await applied_once(lent, known, Packages(("munge",)))
    assert actions == ["install munge"]
    assert lent.shell("n1", "systemctl is-active munge; ls /usr/sbin/policy-rc.d 2>/dev/null; true") == "inactive\n"
    [failed] = await apply(lent, known, Packages(("munge", "no-such-package")))
    assert "Unable to locate package no-such-package" in failed.detail


ALL = f"{AGENT}; pgrep -x apt-get; pgrep -x dpkg"
APT_BEGUN, DPKG_BEGUN, UNPACKED = "pgrep -x apt-get", "pgrep -x dpkg", "ls /var/lib/dpkg/info/munge.postinst"


@pytest.mark.parametrize(
    ("victims", "moment"),
    [
        pytest.param(AGENT, DPKG_BEGUN, id="agent, dpkg has begun"),
        pytest.param(AGENT, APT_BEGUN, id="agent, apt has begun", marks=pytest.mark.matrix),
        pytest.param(AGENT, UNPACKED, id="agent, it is unpacked", marks=pytest.mark.matrix),
        pytest.param(ALL, APT_BEGUN, id="all, apt has begun"),
        pytest.param(ALL, DPKG_BEGUN, id="all, dpkg has begun"),
        pytest.param(ALL, UNPACKED, id="all, it is unpacked"),
    ],
)
async def test_next_run_finishes_a_killed_package_install(lent: Lent, known: Path, victims: str, moment: str) -> None:
    lent.shell("n1", "apt-get -qq purge munge libmunge2 >/dev/null 2>&1 && rm -f /run/watching /run/over /run/struck")
    # The agent stays until it is struck, so that the blow finds it however late it falls.
    stay = "munge --version && touch /run/over && until [ -e /run/struck ]; do sleep 0.1; done"
    document = (Packages(("munge",)), Command("works", ("sh", "-c", stay)))
    async with await connect(lent, known) as host:
        agent = await AgentSession.open(host)
        # One shell on the host looks and strikes, so that it comes in time. A victim may end between the two.
        look = f"touch /run/watching; until {moment} >/dev/null 2>&1 || [ -e /run/over ]; do :; done"
        strike = f"for pid in $({victims}); do kill -KILL $pid 2>/dev/null; done; touch /run/struck"
        striking = asyncio.create_task(asyncio.to_thread(lent.shell, "n1", f"{look}; {strike}"))
        await asyncio.to_thread(lent.shell, "n1", "until [ -e /run/watching ]; do sleep 0.1; done")
        running = asyncio.create_task(agent.apply(document, {}, quiet))
        await striking
        with pytest.raises(AgentFailed, match="n1: the agent was killed while it worked"):
            await running
    installed, worked = await apply(lent, known, *document)
    assert installed.status in ("changed", "ok") and worked.status == "changed", (installed, worked)
    assert "Status: install ok installed" in lent.shell("n1", "dpkg -s munge")
    assert lent.shell("n1", "dpkg --audit; ls /usr/sbin/policy-rc.d 2>/dev/null; systemctl is-active munge; true") == (
        "inactive\n"
    )


# ---------------------------------------------------------------- services


UNIT = "/etc/systemd/system/ticker.service"


def ticker(word: str, **options: bool) -> Document:
    """A daemon of our own whose unit file we write. `exec`: it counts as started once it is what it is to be."""
    text = f"[Service]\nType=exec\nExecStart=/usr/bin/sleep 9999{word}\n[Install]\nWantedBy=multi-user.target\n"
    return File(UNIT, text, restarts=("ticker",)), Service("ticker", **options)


async def test_service_is_restarted_when_its_unit_file_changes(lent: Lent, known: Path) -> None:
    await applied_once(lent, known, *ticker("1"))
    assert lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a").split()[1:] == ["/usr/bin/sleep", "99991"]
    unit, service = await apply(lent, known, *ticker("2"))
    assert unit.status == "changed"
    assert service.action == f"restart ticker (file {UNIT} changes)"
    assert lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a").split()[1:] == ["/usr/bin/sleep", "99992"]
    assert {item.status for item in await apply(lent, known, *ticker("2"))} == {"ok"}


async def test_instance_is_restarted_when_its_template_changes(lent: Lent, known: Path) -> None:
    def instance(word: str) -> Document:
        text = f"[Service]\nType=exec\nExecStart=/usr/bin/sleep 8888{word}\n"
        template = File("/etc/systemd/system/tick@.service", text, restarts=("tick@1",))
        return template, Service("tick@1", enabled=False)

    await apply(lent, known, *instance("1"))
    await apply(lent, known, *instance("2"))
    assert lent.shell("n1", "pgrep -f '^/usr/bin/sleep 8888' -a").split()[1:] == ["/usr/bin/sleep", "88882"]
    await apply(lent, known, Service("tick@1", enabled=False, running=False), File("/etc/systemd/system/tick@.service"))


async def test_service_is_restarted_with_a_drop_in_in_a_new_directory(lent: Lent, known: Path) -> None:
    unit, service = ticker("1")
    await apply(lent, known, unit, service)
    drop_in = f"{UNIT}.d/other.conf"
    settings = File(drop_in, "[Service]\nExecStart=\nExecStart=/usr/bin/sleep 99997\n", restarts=("ticker",))
    await apply(lent, known, unit, settings, service)
    assert "99997" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a")
    await apply(lent, known, unit, File(drop_in, restarts=("ticker",)), service)
    assert "99991" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a")


async def test_quick_restarts_do_not_hit_the_start_limit_of_systemd(lent: Lent, known: Path) -> None:
    unit, service = ticker("1")
    await apply(lent, known, unit, service)
    async with await connect(lent, known) as host, await AgentSession.open(host) as agent:
        for count in range(8):
            settings = File("/etc/ticker.conf", f"{count}\n", restarts=("ticker",))
            report = await agent.apply((unit, settings, service), {}, quiet)
            assert [item.status for item in report.items] == ["ok", "changed", "changed"], report


async def test_restart_of_a_running_service_can_be_deferred(lent: Lent, known: Path) -> None:
    await apply(lent, known, *ticker("2"))
    async with await connect(lent, known) as host, await AgentSession.open(host) as agent:
        await agent.apply(ticker("3"), {}, quiet, defer_restarts=True)
    assert "99992" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a")
    _, service = await apply(lent, known, *ticker("3"))
    assert service.action == f"restart ticker (file {UNIT} changes)"
    assert "99993" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a")


async def test_restart_due_when_the_agent_is_killed_is_made_by_the_next_run(lent: Lent, known: Path) -> None:
    """Killed between the write of the unit file and the restart, at a command that waits there for us."""
    await apply(lent, known, *ticker("4"))
    unit, service = ticker("5")
    wait = Command("wait", ("sh", "-c", "echo $$ > /run/pid; mv /run/pid /run/reached; exec sleep 600"))
    async with await connect(lent, known) as host:
        agent = await AgentSession.open(host)
        running = asyncio.create_task(agent.apply((unit, wait, service), {}, quiet))
        await asyncio.to_thread(lent.shell, "n1", "while [ ! -e /run/reached ]; do sleep 0.1; done")
        assert "99995" in lent.shell("n1", f"cat {UNIT}")
        lent.shell("n1", f"kill -KILL $({AGENT}) $(cat /run/reached); rm /run/reached")
        with pytest.raises(AgentFailed, match="n1: the agent was killed while it worked"):
            await running
    assert "99994" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a"), "it still runs as it was"
    file, restarted = await apply(lent, known, unit, service)
    assert file.status == "ok"
    assert restarted.action == f"restart ticker (file {UNIT} changes)"
    assert "99995" in lent.shell("n1", "pgrep -f '^/usr/bin/sleep 9999' -a")


async def test_service_is_stopped_and_disabled_and_its_unit_removed(lent: Lent, known: Path) -> None:
    await apply(lent, known, *ticker("6"))
    gone: Document = (Service("ticker", enabled=False, running=False), File(UNIT))
    assert (await applied_once(lent, known, *gone))[0] == "disable and stop ticker"
    assert lent.shell("n1", "systemctl show -p LoadState,ActiveState ticker").split() == [
        "LoadState=not-found",
        "ActiveState=inactive",
    ]


async def test_daemon_that_does_not_stay_up_fails_with_its_log(lent: Lent, known: Path) -> None:
    text = "[Service]\nExecStart=/bin/sh -c 'echo no bait left; exit 7'\n"
    unit = "/etc/systemd/system/brief.service"
    _, failed = await apply(lent, known, File(unit, text), Service("brief", enabled=False))
    assert failed.status == "failed"
    assert "brief started and did not stay up" in failed.detail and "no bait left" in failed.detail
    await apply(lent, known, Service("brief", enabled=False, running=False), File(unit))


# ---------------------------------------------------------------- a host without systemd


class WithoutSystemd:
    """The same host, seen from a mount namespace in which nothing says that systemd runs."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.target: Target = host.target

    @property
    def name(self) -> str:
        return self._host.name

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        return await self._host.run(self._inside(argv), stdin=stdin, timeout=timeout, root=root)

    async def start(self, argv: Sequence[str], *, root: bool = True) -> Process:
        return await self._host.start(self._inside(argv), root=root)

    async def close(self) -> None:
        await self._host.close()

    def _inside(self, argv: Sequence[str]) -> list[str]:
        hide = 'mount -t tmpfs none /run/systemd && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh", *argv]


@contextlib.asynccontextmanager
async def plain_agent(lent: Lent, known: Path) -> AsyncIterator[AgentSession]:
    async with await connect(lent, known) as host:
        inside = WithoutSystemd(host)
        async with await AgentSession.open(inside, state="/var/lib/shoal-plain") as agent:  # type: ignore[arg-type]
            yield agent


def daemons(lent: Lent) -> list[str]:
    return lent.shell("n1", "pgrep -x -f 'sleep 4444[0-9]'; true").split()


async def test_supervisor_starts_restarts_and_stops_a_daemon_without_systemd(lent: Lent, known: Path) -> None:
    lent.shell("n1", "mkdir -p /etc/cron.d")
    async with plain_agent(lent, known) as agent:
        assert (await agent.facts(FactsRequest(services=("sleeper",)))).init == "none"
        sleeper = Service("sleeper", command=("sleep", "44441"))
        planned = await agent.check((sleeper,))
        assert planned.items[0].action == "start sleeper under a supervisor"
        assert (await agent.apply((sleeper,), {}, quiet)).changed == 1
        assert not (await agent.apply((sleeper,), {}, quiet)).changed
        assert (await agent.facts(FactsRequest(services=("sleeper",)))).services == {"sleeper": "active"}
    [first] = daemons(lent)
    assert "supervise.py sleeper sleep 44441" in lent.shell("n1", "cat /etc/cron.d/shoal-sleeper")

    lent.shell("n1", f"kill -SEGV {first}")
    lent.shell("n1", f"until pgrep -x -f 'sleep 44441' | grep -v '^{first}$'; do sleep 0.2; done")
    [second] = daemons(lent)
    assert second != first, "it came back by itself, with nobody connected"

    async with plain_agent(lent, known) as agent:
        restarting: Document = (
            File("/etc/sleeper.conf", "deep\n", restarts=("sleeper",)),
            Service("sleeper", command=("sleep", "44441")),
        )
        report = await agent.apply(restarting, {}, quiet)
        assert [item.action for item in report.items] == ["create /etc/sleeper.conf", "restart sleeper"]
        [third] = daemons(lent)
        assert third != second
        other = Service("sleeper", command=("sleep", "44442"))
        assert (await agent.check((other,))).items[0].action == "restart sleeper"
        await agent.apply((other,), {}, quiet)
        assert lent.shell("n1", "pgrep -x -f 'sleep 44441'; true") == ""
        stopped = Service("sleeper", enabled=False, running=False)
        assert (await agent.apply((stopped,), {}, quiet)).items[0].action == "stop sleeper"
        assert not (await agent.apply((stopped,), {}, quiet)).changed
    assert daemons(lent) == []
    assert lent.shell("n1", "pgrep -f 'supervise.py'; ls /etc/cron.d/shoal-sleeper 2>/dev/null; true") == ""


async def test_daemon_that_does_not_stay_up_fails_with_its_log_without_systemd(lent: Lent, known: Path) -> None:
    async with plain_agent(lent, known) as agent:
        brief = Service("brief", command=("sh", "-c", "echo no bait left; exit 7"))
        report = await agent.apply((brief,), {}, quiet)
        assert report.items[0].status == "failed"
        assert "did not stay up" in report.items[0].detail and "no bait left" in report.items[0].detail
        await agent.apply((Service("brief", enabled=False, running=False),), {}, quiet)
        unknown = await agent.apply((Service("nothing"),), {}, quiet)
        assert unknown.items[0].detail == (
            "this host has no systemd, and no command is known for nothing; use a host with systemd"
        )
    assert lent.shell("n1", "pgrep -f 'supervise.py'; true") == ""


async def test_mount_is_written_to_fstab_without_systemd(lent: Lent, known: Path) -> None:
    before = lent.shell("n1", "touch /etc/fstab; chmod 640 /etc/fstab; cat /etc/fstab")
    async with plain_agent(lent, known) as agent:
        # Mounted inside the agent's own namespace; fstab is the host's.
        there = Mount("/srv/plain", "none", "tmpfs", "size=1m")
        assert (await agent.apply((there,), {}, quiet)).changed == 1
        assert not (await agent.apply((there,), {}, quiet)).changed
        assert "none /srv/plain tmpfs size=1m 0 0" in lent.shell("n1", "cat /etc/fstab")
        assert (await agent.apply((Mount("/srv/plain", mounted=False),), {}, quiet)).changed == 1
        assert not (await agent.apply((Mount("/srv/plain", mounted=False),), {}, quiet)).changed
    assert lent.shell("n1", "cat /etc/fstab") == before
    assert lent.shell("n1", "stat -c %a /etc/fstab") == "640\n", "a file of the host's keeps its mode"
