"""A cluster on which faults are made for real, what `shoal doctor` says to each, and the table of that."""

import base64
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import nvml
from tests.doctor_faults import Outcome
from tests.e2e.cluster import Cluster

from shoal.remote.node_health.node import STATE
from shoal.roles.node_health import COMMAND

NODES = ("fish1", "fish2")
SPEC = """\
cluster: doctor-faults
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 1G, gpus: 2}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
files:
  /etc/slurm/prolog.sh: {source: prolog.sh, mode: "0755"}
  /etc/slurm/epilog.sh: {source: epilog.sh, mode: "0755"}
slurm:
  options:
    Prolog: /etc/slurm/prolog.sh
    Epilog: /etc/slurm/epilog.sh
    HealthCheckInterval: 3
    UnkillableStepTimeout: 5
    SlurmdTimeout: 20
    RebootProgram: /bin/true
"""
VM_SPEC = """\
cluster: doctor-clock
controller: {provider: sandbox, cpus: 2, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 1, cpus: 2, memory: 1G}
"""
"""Virtual machines, which have a clock of their own."""
SCRIPT = "#!/bin/sh\n[ ! -e /run/fail-{0} ] || {{ echo 'the {0} cannot find its license' >&2; exit 3; }}\n"
HANG_EPILOG = "[ ! -e /run/hang-epilog ] || sleep 900 || :\n"  # it may be ended, and has not failed
FROZEN = """
import ctypes, os, struct
os.makedirs("/mnt/frozen", exist_ok=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % fuse
assert ctypes.CDLL(None).mount(b"frozen", b"/mnt/frozen", b"fuse", 0, options) == 0
while True:
    size, opcode, unique = struct.unpack_from("=IIQ", os.read(fuse, 1 << 20))
    if opcode == 26:  # the kernel's greeting; what follows is read and never answered
        os.write(fuse, struct.pack("=IiQIIIIHHIIHHI28x", 80, 0, unique, 7, 31, 0, 0, 12, 9, 1 << 16, 1, 1, 0, 0))
"""
"""A file system whose requests are taken and never answered: who waits for one cannot be killed."""
MOUNT_FROZEN = (
    f"systemd-run -q --unit=frozen python3 -c {shlex.quote(FROZEN)}; "
    "until grep -q /mnt/frozen /proc/mounts; do sleep 0.1; done"
)
THAW = "umount -l /mnt/frozen; systemctl kill -s KILL frozen; systemctl reset-failed frozen 2> /dev/null; true"
Findings = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Scene:
    """The cluster, by its command line and by plain ssh."""

    cluster: Cluster
    library: Path | None = None
    """The simulated NVML."""
    nodes: tuple[str, ...] = NODES

    def sh(self, host: str, text: str, *, check: bool = True) -> str:
        done = self.cluster.ssh(host, text)
        assert not check or done.returncode == 0, f"{host}: {text}: {done}"
        return done.stdout

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        self.cluster.wait(what, condition, seconds)

    def examine(self) -> Findings:
        """The findings by id and place."""
        found = self.cluster.json("doctor", status=None)["findings"]
        return {(one["id"], one["host"] or one["job"]): one for one in found}

    def node(self, name: str = "fish1") -> str:
        """The states and the reason of a node, as Slurm has them."""
        text = self.sh("controller", f"scontrol show node {name} --future", check=False)
        state, reason = re.search(r"State=(\S+)", text), re.search(r"Reason=(.*) \[", text)
        return f"{state[1] if state else '?'} {reason[1] if reason else ''}".strip()

    def await_reason(self, words: str, name: str = "fish1", seconds: float = 120.0) -> None:
        self.wait(f"{name} has the reason {words}", lambda: words in self.node(name), seconds)

    def submit(self, *options: str, node: str = "fish1", user: str = "") -> str:
        line = shlex.join(("sbatch", "--parsable", "--chdir=/", "-w", node, *options))
        if "-o" not in options:
            line += " -o /dev/null"
        return self.sh("controller", f"runuser -u {user} -- {line}" if user else line).strip()

    def edit_conf(self, script: str, file: str = "slurm.conf") -> None:
        """Change a file of slurmctld's, as a person would, and start it again."""
        self.sh("controller", f"sed -i {shlex.quote(script)} /etc/slurm/{file} && systemctl restart slurmctld")

    def check_node(self, *gpus: dict[str, object], runs: int = 1, mounts: str = "", **driver: object) -> None:
        """Run the health program on fish1, whose GPUs answer so, with other files of the kernel where `mounts` says."""
        answers = nvml.answers(*(gpus or ({}, {})), **driver)
        program = shlex.join(COMMAND)
        run = f"unshare -m sh -c {shlex.quote(f'{mounts}; exec {program}')}" if mounts else program
        run += " > /dev/null 2>&1"  # a share that hangs keeps a child, which would keep the connection
        stop = "systemctl stop shoal-health.timer"  # `shoal up` starts it
        self.sh("fish1", f"{stop}; printf %s {shlex.quote(answers)} > /etc/shoal-nvml; " + "; ".join([run] * runs))

    def age_node(self) -> None:
        """fish1 is past its first day, and has learned what it has. The tests run its health program, no timer."""
        assert self.library is not None
        library = base64.b64encode(self.library.read_bytes()).decode()
        self.sh("fish1", f"echo {library} | base64 -d > /usr/lib/$(uname -m)-linux-gnu/libnvidia-ml.so.1; ldconfig")
        self.sh("fish1", "systemctl stop shoal-health.timer")
        self.check_node()
        self.sh("fish1", f'sed -i \'s/"since": [0-9.]*/"since": 1000/\' {STATE}/baseline.json')

    def is_idle(self) -> bool:
        """Slurm 24.11 and later keep the reason of a node that was resumed until a job starts there."""
        return all(self.node(name).partition(" ")[0] in ("IDLE", "IDLE+DYNAMIC_NORM") for name in self.nodes)


@dataclass(frozen=True)
class Fault:
    """A row of the table: what must be found, and why."""

    number: int
    finding: str
    evidence: str
    """A regular expression that the evidence of the finding has: its cause."""
    fix: bool = False
    """`shoal doctor --fix` claims to fix it, after the repair."""
    how: str = "real"


@dataclass(frozen=True)
class Case:
    """One fault, or several that are made at once: how they are made, and how they end."""

    faults: tuple[Fault, ...]
    make: Callable[[Scene], object]
    host: str = "fish1"
    also: tuple[str, ...] = ()
    """Other findings that may come with it."""
    repair: Callable[[Scene], object] | None = None
    """What a person does as the findings say."""
    more_fixes: tuple[str, ...] = ()
    """Other findings that are fixed with them."""
    after: Callable[[Scene], object] | None = None
    """What brings the cluster to its first state, where a fix leaves it in another."""
    patience_s: float = 120.0
    """For the faults to show: Slurm has its own timeouts."""

    @property
    def name(self) -> str:
        return "+".join(f"{fault.number}-{fault.finding}" for fault in self.faults[:4])


def play(scene: Scene, case: Case, outcomes: Mapping[int, Outcome]) -> None:
    """Make the faults, look, repair them, and wait until every node is idle and nothing is found."""
    case.make(scene)
    found: Findings = {}

    def find(fault: Fault) -> dict[str, Any] | None:
        places = (place for id, place in found if id == fault.finding and (place == case.host or not case.host))
        return next((found[fault.finding, place] for place in places), None)

    def are_found() -> bool:
        nonlocal found
        found = scene.examine()
        missing = [fault.finding for fault in case.faults if find(fault) is None]
        assert not missing, f"{missing} not among {[*found]}; {case.host} is {scene.node()}"
        return True

    try:
        scene.wait("the faults are found", are_found, case.patience_s)
    finally:
        for fault in case.faults:
            outcomes[fault.number].detected = "yes" if find(fault) else "NO"
    others = {id for id, _ in found} - {fault.finding for fault in case.faults} - {*case.also, *case.more_fixes}
    assert not others, f"found beside them: {others}: {found}"
    for fault in case.faults:
        finding = find(fault) or {}
        text = "\n".join([finding["what"], *finding["evidence"]])
        assert re.search(fault.evidence, text), f"the evidence of {fault.finding} is {text}"
        assert finding["cause"] and finding["fix"] and (fault.fix <= bool(finding["action"])), finding
        outcomes[fault.number].cause = "yes"
    if case.repair:
        case.repair(scene)
    claimed = [fault for fault in case.faults if fault.fix]
    fixes: list[dict[str, Any]] = []
    if claimed:
        names = dict.fromkeys([*(fault.finding for fault in claimed), *case.more_fixes])
        fixes = scene.cluster.json("doctor", "--fix", *names, "--yes", status=None)["fixes"]
    for fault in case.faults:
        results = [one for one in fixes if one["id"] == fault.finding]
        assert not fault.fix or (results and all(one["fixed"] for one in results)), f"{fault.finding}: {fixes}"
        outcomes[fault.number].fix = "yes" if fault.fix else "by hand"
    await_health(scene)
    if case.after:
        case.after(scene)
        await_health(scene)
    for fault in case.faults:
        outcomes[fault.number].idle = "yes"


def await_health(scene: Scene) -> None:
    scene.wait(f"all nodes are idle (fish1 was {scene.node()})", scene.is_idle, 180)
    scene.wait("nothing is found", lambda: scene.examine() == {}, 60)


def now_us() -> int:
    """The kernel's clock, as in its log."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
