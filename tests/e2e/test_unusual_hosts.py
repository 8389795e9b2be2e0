"""Unusual hosts: other user ids, another package manager, no Python, another Slurm, a busy apt, a wrong clock.

Six hosts, and four runs of `up`: the first reports all problems, in the second agents and connections are killed,
before the third everything is repaired, and the fourth has no changes. Sandbox hosts share this machine's clock, so the
wrong clock is a shifted time.time() in the Python of one host. libfaketime breaks time.sleep() of Python 3.11 on arm64.
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
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text

from shoal.spec.member import Shape

COVERS = "roles/user_ids roles/clock agent remote/agent/packages.py remote/agent/unix_accounts.py plan/observe verbs/up"
pytestmark = pytest.mark.sandbox

DESK = """\
groupadd --gid 905 munge && useradd --system --uid 905 --gid munge --no-create-home munge
groupadd --gid 64030 slurm && useradd --system --uid 64030 --gid slurm --no-create-home slurm
mkdir -p /etc/slurm
cat > /etc/slurm/slurm.conf <<'END'
# an earlier cluster
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

# Python reads `encodings` from its file at every start, with -I and -S too; `os` and `site` are frozen.
FAST_CLOCK = """\
for file in /usr/lib/python3.*/encodings/__init__.py; do
    cp -p $file /root/encodings.py
    printf 'import time\\n_time = time.time\\ntime.time = lambda: _time() + 130\\n' >> $file
done
"""

RIGHT_CLOCK = "cp -p /root/encodings.py /usr/lib/python3.*/encodings/__init__.py"

ODDITIES = {"desk": DESK, "moved": MOVED, "stuck": STUCK, "alien": ALIEN, "bare": BARE, "made": MADE + FAST_CLOCK}
NAMES = tuple(ODDITIES)


@dataclass(frozen=True)
class Setup:
    lent: Lent
    cluster: Cluster


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    shapes = {name: Shape(memory_mb=1024 if name == "desk" else 512) for name in NAMES}
    with lent_hosts("x-odd-made", shapes, "x-odd") as lent:
        for name, script in ODDITIES.items():
            lent.shell(name, script)
        text = spec_text("x-odd", lent, "desk", NAMES[1:], compute=True)
        yield Setup(lent, Cluster(tmp_path_factory.mktemp("odd"), text))


# ---------------------------------------------------------------- the plan and the first run


@pytest.fixture(scope="module")
def planned(setup: Setup) -> Any:
    """The plan before the first run."""
    return setup.cluster.json("plan", status=3)


@pytest.fixture(scope="module")
def first(setup: Setup, planned: Any) -> str:
    """The terminal output of the first `up`. apt is busy on one host until the output shows that."""
    setup.lent.shell("moved", HOLD_APT)
    with Screen(setup.cluster.line("up")) as screen:
        try:
            screen.until(r"moved: apt: waiting for python3 \(pid \d+\)")
        finally:
            setup.lent.shell("moved", RELEASE_APT)
        status = screen.end()
    assert status == 3, screen.text
    return screen.text


def test_plan_reports_all_problems_of_a_host_at_once(planned: Any) -> None:
    assert set(planned["unreached"]) == {"alien", "bare"}
    findings = "\n".join(f"{finding['host']}: {finding['found']}" for finding in planned["findings"])
    assert "stuck: group munge has id 7001 here and needs 905" in findings
    assert "stuck: user munge has id 7001 here and needs 905" in findings
    assert "stuck: user slurm has id 7002 here and needs 64030" in findings and "sleep (pid " in findings
    assert all(change["action"] for change in planned["changes"]), planned


def test_wrong_clock_is_reported_with_its_offset_and_the_limit_of_munge(planned: Any) -> None:
    assert clocks(planned).keys() == {"made"}
    offset, fix = clocks(planned)["made"]
    # The offset includes the time that the answer took on a busy machine.
    assert re.fullmatch(r"\+1[234]\d s against this machine", offset), offset
    assert fix == "run `timedatectl set-ntp true` on it; munge rejects messages from 300 s on"


def clocks(output: Any) -> dict[str, tuple[str, str]]:
    findings = [finding for finding in output["findings"] if finding["what"] == "the clock is off"]
    return {finding["host"]: (finding["found"], finding["fix"]) for finding in findings}


def test_file_with_a_conflicting_id_outside_slurm_directories_is_reported(first: str) -> None:
    assert re.search(r"stuck: .*belong to 7001: /srv/data/kept\. Hand them over", first), first
    assert "find / -xdev -uid 7001 -exec chown -h 905 {} +" in first


def test_other_package_manager_is_rejected_by_name(first: str) -> None:
    assert "alien: packages are installed with apt; found dnf (debian 12)" in first
    assert "fix: use a Debian or Ubuntu host" in first


def test_host_without_python_gets_the_package_to_install(first: str) -> None:
    assert "bare: has no python3, which Shoal needs there" in first
    assert "fix: install it: apt-get install python3" in first


def test_slurmd_of_another_installation_on_the_port_is_named(first: str) -> None:
    assert re.search(r"made: .*slurmd", first), first
    assert re.search(r"port 6818 is taken by slurmd \(pid \d+\)", first), first


def test_ids_without_dependents_are_changed(setup: Setup, first: str) -> None:
    for name, numbers in (("munge", "905:905"), ("slurm", "64030:64030")):
        for host in ("desk", "moved"):
            assert setup.lent.shell(host, f"echo $(id -u {name}):$(id -g {name})").strip() == numbers
    owners = setup.lent.shell("moved", "stat -c %U:%G /var/lib/munge/seed /var/lib/slurm/old/state").split()
    assert owners == ["munge:munge", "slurm:slurm"]


def test_other_hosts_form_a_working_cluster_meanwhile(setup: Setup, first: str) -> None:
    assert "x-odd: changed desk,made,moved; not complete" in first
    # Named, because the other slurmd on `made` answers slurmctld as well.
    names = setup.cluster.on("desk", "srun", "-N2", "-w", "desk,moved", "hostname").split()
    assert sorted(names) == ["desk", "moved"]


def test_nodes_of_an_existing_slurm_conf_are_not_added(setup: Setup, planned: Any, first: str) -> None:
    assert not [change for change in planned["changes"] if change["what"] == "node"]
    assert {"gone1", "DEFAULT"}.isdisjoint(setup.cluster.states())


@pytest.mark.parametrize(("host", "line"), [("desk", "ClusterName=ancient"), ("made", "ClusterName=byhand")])
def test_existing_slurm_conf_is_backed_up(setup: Setup, first: str, host: str, line: str) -> None:
    assert line in setup.lent.shell(host, "cat /etc/slurm/slurm.conf.before-shoal")


# ---------------------------------------------------------------- agents and connections killed


AGENT = "pgrep -f '^python3 -I -S -B -c'"
SESSIONS = "pgrep -f '^sshd: shoal'"


@pytest.fixture(scope="module")
def second(setup: Setup, first: str) -> Any:
    """`up` during which one agent and one connection are killed on their hosts, while they wait for apt."""
    lent = setup.lent
    fix = re.findall(r"(find / -xdev -[ug]id 7001 -exec \w+ -h 905 \{\} \+)", first)
    lent.shell("stuck", "\n".join(dict.fromkeys(fix)))
    lent.shell("bare", "mv /usr/bin/python3.away /usr/bin/python3")
    lent.shell("alien", "mv /root/apt-get /usr/bin/apt-get; rm /usr/bin/dnf")
    lent.shell("made", f"systemctl stop byhand; {RIGHT_CLOCK}")
    for host in ("bare", "alien"):
        lent.shell(host, HOLD_APT)
    running = setup.cluster.background("up", "--json")
    try:
        for host, victim in (("bare", AGENT), ("alien", SESSIONS)):
            # The policy file is written just before the wait for apt.
            lent.shell(host, "while [ ! -e /usr/sbin/policy-rc.d ]; do sleep 0.1; done")
            # The processes of a session end together, so the second may be gone already.
            lent.shell(host, f"for pid in $({victim}); do kill -KILL $pid 2>/dev/null; done; true")
        output = running.communicate(timeout=LIMIT)[0]
    finally:
        kill(running)
        for host in ("bare", "alien"):
            lent.shell(host, RELEASE_APT)
    assert running.returncode == 3, output
    return json.loads(output)


def test_killed_agent_is_reported_and_other_hosts_finish(second: Any) -> None:
    assert "the agent was killed" in second["failures"]["bare"]["message"], second
    assert "run `shoal up` again" in second["failures"]["bare"]["fix"]
    assert "made" in second["changed"]


def test_killed_connection_is_reported_and_other_hosts_finish(second: Any) -> None:
    assert "the connection broke while it ran `python3`" in second["failures"]["alien"]["message"], second
    assert "run the same again" in second["failures"]["alien"]["fix"]


def test_reported_steps_repair_the_files_and_only_the_process_remains(second: Any) -> None:
    message = second["failures"]["stuck"]["message"]
    assert "sleep (pid " in message and "Stop them and run again" in message
    assert "/srv/data" not in message
    assert set(second["failures"]) == {"stuck", "bare", "alien"}


# ---------------------------------------------------------------- everything repaired


@pytest.fixture(scope="module")
def third(setup: Setup, second: Any) -> Any:
    setup.lent.shell("stuck", "systemctl stop keeper")
    return setup.cluster.json("up", timeout=600)


def test_next_up_converges_after_the_kills(setup: Setup, third: Any) -> None:
    assert third["whole"] and set(third["changed"]) == {"stuck", "alien", "bare"}, third
    assert sorted(setup.cluster.on("desk", "srun", "-N6", "hostname").split()) == sorted(NAMES)


def test_corrected_clock_is_not_reported(third: Any) -> None:
    assert clocks(third) == {}


def test_killed_run_leaves_nothing_behind(setup: Setup, third: Any) -> None:
    for host in ("bare", "alien"):
        assert setup.lent.shell(host, f"ls /usr/sbin/policy-rc.d 2>/dev/null; {AGENT}; true") == ""


def test_repaired_file_belongs_to_munge(setup: Setup, third: Any) -> None:
    assert setup.lent.shell("stuck", "stat -c %U:%G /srv/data/kept").strip() == "munge:munge"


def test_last_up_has_no_changes(setup: Setup, third: Any) -> None:
    assert setup.cluster.json("up")["unchanged"]


class Screen:
    """A command in a terminal that is wide enough for every line."""

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
            assert self._read(), f"ended before it printed {pattern}\n{self.text}"

    def end(self) -> int:
        while self._read():
            pass
        return self._process.wait(timeout=LIMIT)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0, self._end - time.monotonic()))
        assert ready, f"timed out\n{self.text}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the terminal has no writer any more
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)
