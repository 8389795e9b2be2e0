"""Hosts as people really have them: other ids, other package managers, no Python, a Slurm of their own, a busy apt.

Six lent hosts, each odd in its own way, and four runs of `up`: the first meets them all, the second has agents and
connections killed under it, the third finds everything repaired, the fourth has nothing left to do. Sandbox hosts share
this machine's clock; one that is wrong is wrong for Python only, by faketime.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.cluster import HOLD_APT, LIMIT, RELEASE_APT, Cluster, kill
from tests.e2e.lent import Lent, lent_hosts, spec_text

from shoal.spec.member import Shape

pytestmark = pytest.mark.sandbox

DESK = """\
groupadd --gid 905 munge && useradd --system --uid 905 --gid munge --no-create-home munge
groupadd --gid 64030 slurm && useradd --system --uid 64030 --gid slurm --no-create-home slurm
mkdir -p /etc/slurm
cat > /etc/slurm/slurm.conf <<'END'
# the cluster before last
ClusterName=ancient
SlurmctldHost=desk
NodeName=DEFAULT CPUs=64
NodeName=gone[1-3]
PartitionName=all Nodes=ALL Default=YES
END
"""

MOVED = """\
groupadd --gid 7001 munge && useradd --system --uid 7001 --gid munge --no-create-home munge
groupadd --gid 7002 slurm && useradd --system --uid 7002 --gid slurm --no-create-home slurm
mkdir -p /var/lib/munge /var/lib/slurm/old
echo seed > /var/lib/munge/seed; echo state > /var/lib/slurm/old/state
chown -R munge:munge /var/lib/munge; chown -R slurm:slurm /var/lib/slurm
"""

STUCK = """\
groupadd --gid 7001 munge && useradd --system --uid 7001 --gid munge --no-create-home munge
groupadd --gid 7002 slurm && useradd --system --uid 7002 --gid slurm --no-create-home slurm
mkdir /srv/data; echo kept > /srv/data/kept; chown munge:munge /srv/data/kept
systemd-run --quiet --unit=keeper --uid=slurm sleep infinity
"""

ALIEN = "mv /usr/bin/apt-get /root/apt-get; printf '#!/bin/sh\\nexit 1\\n' > /usr/bin/dnf; chmod 755 /usr/bin/dnf"

BARE = "mv /usr/bin/python3 /usr/bin/python3.away"

MADE = """\
DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends slurmd munge >/dev/null 2>&1
mkdir -p /etc/slurm /opt/slurm/etc /opt/slurm/spool
cat > /opt/slurm/etc/slurm.conf <<'END'
ClusterName=byhand
SlurmctldHost=made
SlurmdSpoolDir=/opt/slurm/spool
SlurmdPidFile=/run/byhand.pid
ProctrackType=proctrack/linuxproc
NodeName=made CPUs=1
PartitionName=all Nodes=made
END
printf 'CgroupPlugin=cgroup/v1\\n' > /opt/slurm/etc/cgroup.conf
cp /opt/slurm/etc/*.conf /etc/slurm/
systemctl start munge
systemd-run --quiet --unit=byhand slurmd -D -f /opt/slurm/etc/slurm.conf
"""

FAST_CLOCK = """\
DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends faketime >/dev/null 2>&1
rm /usr/bin/python3
printf '#!/bin/sh\\nexec faketime -f +130s /usr/bin/python3.11 "$@"\\n' > /usr/bin/python3
chmod 755 /usr/bin/python3
"""

RIGHT_CLOCK = "ln -sf python3.11 /usr/bin/python3"

ODDITIES = {"desk": DESK, "moved": MOVED, "stuck": STUCK, "alien": ALIEN, "bare": BARE, "made": MADE + FAST_CLOCK}
NAMES = tuple(ODDITIES)


@dataclass(frozen=True)
class Place:
    lent: Lent
    cluster: Cluster


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    shapes = {name: Shape(memory_mb=1024 if name == "desk" else 512) for name in NAMES}
    with lent_hosts("x-odd-made", shapes, "x-odd") as lent:
        for name, script in ODDITIES.items():
            lent.shell(name, script)
        text = spec_text("x-odd", lent, "desk", NAMES[1:], compute=True)
        yield Place(lent, Cluster(tmp_path_factory.mktemp("odd"), text))


# ---------------------------------------------------------------- what the plan and the first run say


@pytest.fixture(scope="module")
def planned(place: Place) -> Any:
    """What the hosts were said to be before anything was done."""
    return place.cluster.json("plan", status=3)


@pytest.fixture(scope="module")
def first(place: Place, planned: Any) -> str:
    """What a terminal showed of the first `up`. apt was busy on one host until the screen said so."""
    place.lent.shell("moved", HOLD_APT)
    with Screen(place.cluster.line("up")) as screen:
        try:
            screen.until(r"moved: apt: waiting for python3 \(pid \d+\)")
        finally:
            place.lent.shell("moved", RELEASE_APT)
        status = screen.end()
    assert status == 3, screen.text
    return screen.text


def test_the_plan_tells_all_that_stands_in_the_way_of_a_host_at_once(planned: Any) -> None:
    assert set(planned["unreached"]) == {"alien", "bare"}
    told = "\n".join(f"{finding['host']}: {finding['found']}" for finding in planned["findings"])
    assert "stuck: group munge has id 7001 here and needs 905" in told
    assert "stuck: user munge has id 7001 here and needs 905" in told
    assert "stuck: user slurm has id 7002 here and needs 64030" in told and "sleep (pid " in told
    assert all(change["action"] for change in planned["changes"]), planned


def test_a_clock_that_is_off_is_told_with_how_far_and_what_munge_makes_of_it(planned: Any) -> None:
    assert clocks(planned).keys() == {"made"}
    found, fix = clocks(planned)["made"]
    # As far as it is, give or take how long the answer took on a busy machine.
    assert re.fullmatch(r"\+1[234]\d s against this machine", found), found
    assert fix == "run `timedatectl set-ntp true` on it; munge refuses messages from 300 s on"


def clocks(said: Any) -> dict[str, tuple[str, str]]:
    found = [finding for finding in said["findings"] if finding["what"] == "the clock is off"]
    return {finding["host"]: (finding["found"], finding["fix"]) for finding in found}


def test_a_file_elsewhere_that_depends_on_an_id_is_reported_with_the_steps(first: str) -> None:
    assert re.search(r"stuck: .*belong to 7001: /srv/data/kept\. Hand them over", first), first
    assert "find / -xdev -uid 7001 -exec chown -h 905 {} +" in first


def test_another_package_manager_is_refused_by_name(first: str) -> None:
    assert "alien: packages are installed with apt; found dnf (debian 12)" in first
    assert "fix: use a Debian or Ubuntu host" in first


def test_a_host_without_python_is_told_what_to_install(first: str) -> None:
    assert "bare: has no python3, which Shoal needs there" in first
    assert "fix: install it: apt-get install python3" in first


def test_a_slurmd_of_another_install_that_has_the_port_is_named(first: str) -> None:
    assert re.search(r"made: .*slurmd", first), first
    assert re.search(r"port 6818 is taken by slurmd \(pid \d+\)", first), first


def test_ids_on_which_nothing_depends_are_aligned(place: Place, first: str) -> None:
    for name, numbers in (("munge", "905:905"), ("slurm", "64030:64030")):
        for host in ("desk", "moved"):
            assert place.lent.shell(host, f"echo $(id -u {name}):$(id -g {name})").strip() == numbers
    owners = place.lent.shell("moved", "stat -c %U:%G /var/lib/munge/seed /var/lib/slurm/old/state").split()
    assert owners == ["munge:munge", "slurm:slurm"]


def test_the_other_hosts_are_a_working_cluster_meanwhile(place: Place, first: str) -> None:
    assert "x-odd: changed desk,made,moved; not complete" in first
    # Named, because the slurmd that somebody else runs on `made` answers slurmctld as well.
    names = place.cluster.on("desk", "srun", "-N2", "-w", "desk,moved", "hostname").split()
    assert sorted(names) == ["desk", "moved"]


def test_nodes_of_a_slurm_conf_that_is_not_ours_are_none_of_ours(place: Place, planned: Any, first: str) -> None:
    assert not [change for change in planned["changes"] if change["what"] == "node"]
    assert {"gone1", "DEFAULT"}.isdisjoint(place.cluster.states())


@pytest.mark.parametrize(("host", "line"), [("desk", "ClusterName=ancient"), ("made", "ClusterName=byhand")])
def test_a_slurm_conf_made_by_hand_is_kept_beside_ours(place: Place, first: str, host: str, line: str) -> None:
    assert line in place.lent.shell(host, "cat /etc/slurm/slurm.conf.before-shoal")


# ---------------------------------------------------------------- agents and connections killed


AGENT = "pgrep -f '^python3 -I -S -B -c'"
SESSIONS = "pgrep -f '^sshd: shoal'"


@pytest.fixture(scope="module")
def second(place: Place, first: str) -> Any:
    """`up` under which one agent and one connection are killed from the host's side, while they wait for apt."""
    lent = place.lent
    fix = re.findall(r"(find / -xdev -[ug]id 7001 -exec \w+ -h 905 \{\} \+)", first)
    lent.shell("stuck", "\n".join(dict.fromkeys(fix)))
    lent.shell("bare", "mv /usr/bin/python3.away /usr/bin/python3")
    lent.shell("alien", "mv /root/apt-get /usr/bin/apt-get; rm /usr/bin/dnf")
    lent.shell("made", f"systemctl stop byhand; {RIGHT_CLOCK}")
    for host in ("bare", "alien"):
        lent.shell(host, HOLD_APT)
    running = place.cluster.background("up", "--json")
    try:
        for host, victim in (("bare", AGENT), ("alien", SESSIONS)):
            # The policy file is the last thing before the wait for apt.
            lent.shell(host, "while [ ! -e /usr/sbin/policy-rc.d ]; do sleep 0.1; done")
            # The processes of a session end together: of two that are named, one may be gone when its turn comes.
            lent.shell(host, f"for pid in $({victim}); do kill -KILL $pid 2>/dev/null; done; true")
        output = running.communicate(timeout=LIMIT)[0]
    finally:
        kill(running)
        for host in ("bare", "alien"):
            lent.shell(host, RELEASE_APT)
    assert running.returncode == 3, output
    return json.loads(output)


def test_a_killed_agent_is_named_and_the_others_finish(second: Any) -> None:
    assert "the agent was killed" in second["failures"]["bare"]["message"], second
    assert "run `shoal up` again" in second["failures"]["bare"]["fix"]
    assert "made" in second["changed"]


def test_a_killed_connection_is_named_and_the_others_finish(second: Any) -> None:
    assert "the connection broke while it ran `python3`" in second["failures"]["alien"]["message"], second
    assert "run the same again" in second["failures"]["alien"]["fix"]


def test_the_steps_that_were_told_mend_the_files_and_the_process_is_what_is_left(second: Any) -> None:
    told = second["failures"]["stuck"]["message"]
    assert "sleep (pid " in told and "Stop them and run again" in told
    assert "/srv/data" not in told
    assert set(second["failures"]) == {"stuck", "bare", "alien"}


# ---------------------------------------------------------------- everything repaired


@pytest.fixture(scope="module")
def third(place: Place, second: Any) -> Any:
    place.lent.shell("stuck", "systemctl stop keeper")
    return place.cluster.json("up", timeout=600)


def test_the_next_up_converges_whatever_was_killed(place: Place, third: Any) -> None:
    assert third["whole"] and set(third["changed"]) == {"stuck", "alien", "bare"}, third
    assert sorted(place.cluster.on("desk", "srun", "-N6", "hostname").split()) == sorted(NAMES)


def test_a_clock_that_was_set_right_is_told_no_more(third: Any) -> None:
    assert clocks(third) == {}


def test_nothing_of_a_killed_run_stays(place: Place, third: Any) -> None:
    for host in ("bare", "alien"):
        assert place.lent.shell(host, f"ls /usr/sbin/policy-rc.d 2>/dev/null; {AGENT}; true") == ""


def test_a_file_that_was_handed_over_is_munges_again(place: Place, third: Any) -> None:
    assert place.lent.shell("stuck", "stat -c %U:%G /srv/data/kept").strip() == "munge:munge"


def test_then_there_is_nothing_left_to_do(place: Place, third: Any) -> None:
    assert place.cluster.json("up")["unchanged"]


class Screen:
    """A command on a terminal of its own, so wide that no line is wrapped."""

    def __init__(self, argv: list[str]) -> None:
        self.text = ""
        self._end = time.monotonic() + LIMIT
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 1000, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "1000"}
        self._process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def until(self, pattern: str) -> None:
        while not re.search(pattern, self.text):
            assert self._read(), f"ended before it said {pattern}\n{self.text}"

    def end(self) -> int:
        while self._read():
            pass
        return self._process.wait(timeout=LIMIT)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0, self._end - time.monotonic()))
        assert ready, f"it takes too long\n{self.text}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how a terminal says that nobody writes to it any more
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)
