"""A real cluster for tests: `shoal` commands on sandbox hosts, with faults on demand."""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import installed_images
from tests.e2e.leftovers import TAG, noted
from tests.e2e.shoal_server import CAPTURED, NOBODY, ROOTS_PROGRAM, finish
from tests.sandbox_faults import SandboxFaults
from tests.timing import phase

from shoal.errors import ShoalError
from shoal.hosts.api import Target
from shoal.sandbox import lifecycle
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.slurm.state import NODES_COMMAND, parse_nodes

KIND = os.environ.get("SHOAL_TEST_KIND", "")
"""What sandbox hosts are: `SHOAL_TEST_KIND=vm .venv/bin/pytest tests/e2e/test_confinement.py` uses virtual machines.

With `podman` or `docker` they are containers of that engine; test_cluster.py then runs as an ordinary user, too."""
ENGINES = ("podman", "docker")
"""Kinds whose hosts have no cgroups for Slurm."""

SLOWNESS = 9 if KIND == "vm" else 1
"""How many times as long as on containers something may take: virtual machines may be emulated."""

LIMIT = 600.0 * SLOWNESS
"""Seconds for whatever ends by itself. Generous: the machine may be busy. Reached only by what hangs."""


IMAGE = os.environ.get("SHOAL_TEST_IMAGE", "")
"""What hosts run on which a test says nothing: `SHOAL_TEST_IMAGE=debian13 scripts/test tests/e2e/test_storage.py`."""


ON_DEBIAN_12 = pytest.mark.skipif(bool(IMAGE), reason=f"needs hosts on Debian 12, and SHOAL_TEST_IMAGE={IMAGE} is set")
"""For tests of torch, whose wheel is for its Python, and of cgroups in files that are for containers alone."""
WITH_CGROUPS = pytest.mark.skipif(
    bool(IMAGE) or KIND in ENGINES,
    reason="needs Slurm's cgroups, which containers have on Debian 12 alone, and engines never",
)
"""For tests of cgroups."""


def on_image(text: str, image: str = IMAGE) -> str:
    """A spec whose sandbox hosts have this image where it names none. Rented ones bring their own."""
    if not image:
        return text
    bare = r"\{provider: sandbox(?![^}]*(?:image|max):)([^}]*)\}"
    return re.sub(bare, rf"{{provider: sandbox\1, image: {image}}}", text.replace(", cgroups: true", ""))


SLURM = os.environ.get("SHOAL_TEST_SLURM", "")
"""Where Slurm comes from where a test says nothing: `SHOAL_TEST_SLURM=shoal scripts/test tests/e2e/test_cluster.py`."""


def with_slurm(text: str, source: str = SLURM) -> str:
    """A spec with Slurm from this source, where it names none."""
    return f"{text}slurm: {{from: {source}}}\n" if source and "\nslurm:" not in text else text


def of_kind(text: str, kind: str = KIND) -> str:
    """A spec whose sandbox hosts are of this kind, where it names none."""
    if not kind or "provider: sandbox" not in text or re.search("^sandbox:", text, re.MULTILINE):
        return text
    text = text.replace(", cgroups: true", "") if kind in ENGINES else text
    return re.sub(r"^cluster: .*$", rf"\g<0>\nsandbox: {kind}", text, count=1, flags=re.MULTILINE)


@contextmanager
def login_keys(*users: str) -> Iterator[Path]:
    """A directory with a key for each user. It is not below pytest's, which root alone may enter."""
    with tempfile.TemporaryDirectory(prefix="shoal-login-") as name:
        place = Path(name)
        place.chmod(0o755)
        for user in users:
            key = place / user
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=LIMIT)
            os.chown(key, NOBODY, NOBODY)
        yield place


ALIVE = f"ServerAliveInterval={20 if KIND == 'vm' else 5}"
"""A connection on which nothing comes for three times as long ends, and the next command makes another."""


def keep_connection(layout: Layout, host: str) -> list[str]:
    """Options of ssh for one connection that commands share: a login takes 170 ms of CPU, nearly all on the host."""
    leader = lifecycle.group(layout, host).leader()  # with another boot another connection, for the old one hangs
    persist = ("-o", "ControlMaster=auto", "-o", "ControlPersist=300", "-o", ALIVE)
    return ["-S", f"{_sockets()}/{layout.id}-{host}-{leader}", *persist]


def end_connections(layout: Layout, host: str = "*") -> None:
    for socket in _sockets().glob(f"{layout.id}-{host}-*"):
        subprocess.run(["ssh", "-q", "-O", "exit", "-S", socket, "-"], stderr=subprocess.DEVNULL, timeout=LIMIT)
        socket.unlink(missing_ok=True)


@functools.cache
def _sockets() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="shoal-ssh-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


VM_BY_HAND = [
    pytest.mark.sandbox,
    pytest.mark.matrix,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(KIND != "vm", reason="by hand, with SHOAL_TEST_KIND=vm: it takes many minutes under emulation"),
]
"""The marks of a file that is run on virtual machines alone."""


class Cluster:
    """One spec file and the command line around it."""

    def __init__(self, directory: Path, text: str) -> None:
        self.file = directory / "shoal.yaml"
        text = of_kind(on_image(with_slurm(text)))
        self.file.write_text(text)
        self.name = text.split("cluster:")[1].split()[0]
        # Host keys of an earlier run would be those of other machines.
        self.env = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), TAG: self.name}
        self.provider = SandboxProvider()
        if "sandbox: vm" in text:
            self.provider = SandboxProvider(installed_images.prepare_machines(text))
            self.env["SHOAL_CACHE"] = str(self.provider.cache)
        # Set by pytest-xdist, and in force for the tables of `shoal` as if the user had said so.
        self.env.pop("COLUMNS", None)
        self._begun: list[subprocess.Popen[str]] = []

    def shoal(
        self, *arguments: str, status: int | None = 0, timeout: float = LIMIT, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line; `status` is the exit status it must have, None for any."""
        with phase(arguments[0], Layout(self.provider.cache, self.name)):
            done = finish(self.begin(*arguments, **CAPTURED, cwd=cwd), timeout)
        report = f"shoal {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert status is None or done.returncode == status, report
        return done

    def json(self, *arguments: str, status: int | None = 0, timeout: float = LIMIT) -> Any:
        at = 2 if arguments[0] in ("node", "env", "bench", "keys") else 1
        with_json = (*arguments[:at], "--json", *arguments[at:])
        return json.loads(self.shoal(*with_json, status=status, timeout=timeout).stdout)

    def line(self, *arguments: str) -> list[str]:
        """The command line of the real program, for tests that start it themselves."""
        return ROOTS_PROGRAM.line(*self._with_file(*arguments))

    def begin(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Begin a command line, with options of subprocess.Popen."""
        return ROOTS_PROGRAM.popen(*self._with_file(*arguments), env=self.env, **options)

    def _with_file(self, *arguments: str) -> list[str]:
        # Options come after the verb and before `--`, where the command of `exec` and `ssh` begins.
        at = 2 if arguments[0] in ("node", "env", "bench", "keys") else 1
        return [*arguments[:at], "--file", str(self.file), *arguments[at:]]

    def background(
        self, *arguments: str, stderr: int = subprocess.STDOUT, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Begin a command line, and go on. What a failed test leaves running ends before the cluster goes."""
        begun = self.begin(*arguments, stdout=subprocess.PIPE, stderr=stderr, cwd=cwd, start_new_session=True)
        self._begun.append(begun)
        return begun

    def down(self) -> None:
        """Take the hosts away, whatever runs on them or changes them."""
        for process in self._begun:
            if process.poll() is None:
                kill(process)
        end_connections(self._layout)
        self.shoal("down", "--force")

    def on(self, host: str, *argv: str, status: int | None = 0) -> str:
        """Run a program on one host as root and return what it printed: by plain ssh on hosts that a provider made."""
        if host in self.instances():
            done = self.ssh(host, shlex.join(argv))
            assert status is None or done.returncode == status, f"{host}: {argv} {done}"
            return done.stdout
        result = self.json("exec", "--hosts", host, "--", *argv, status=None)
        [group] = result["groups"]
        assert status is None or group["status"] == status, group
        return str(group["stdout"])

    def ssh(self, host: str, command: str, login: bool = False) -> subprocess.CompletedProcess[str]:
        """A shell command on a sandbox host, without Shoal, also when the spec no longer names it.

        `login`: with a login of its own, not over the connection that is kept.
        """
        target = self.instances()[host]
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-i", str(target.identity)]
        # OpenSSH's own choice of key exchange takes a quarter of a second of CPU.
        options += ["-o", "KexAlgorithms=curve25519-sha256", "-p", str(target.port or 22)]
        line = ["ssh", "-q", "-o", "ConnectTimeout=30", *options, f"root@{target.address}"]
        if not login:
            line[1:1] = keep_connection(self._layout, host)
        return subprocess.run([*line, command], capture_output=True, text=True, timeout=LIMIT / 2, env=self.env)

    def install(self, packages: Mapping[str, str]) -> None:
        """Install packages of the distribution on hosts, on all at once: their names with blanks, by host."""
        line = "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda host: self.on(host, "sh", "-c", line + packages[host]), packages))

    def instances(self) -> dict[str, Target]:
        return {instance.name: instance.target for instance in asyncio.run(self.provider.instances(self.name))}

    def addresses(self) -> dict[str, str]:
        """The address of each host on the cluster's network; the machine may reach it at another."""
        return {host.name: host.address for host in self._layout.hosts().values()}

    @property
    def _layout(self) -> Layout:
        return Layout(self.provider.cache, self.name)

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def fault(self, what: str, host: str) -> None:
        """cut, heal, freeze, thaw, kill, start, reboot, fill_disk or empty_disk a host."""
        asyncio.run(getattr(SandboxFaults(self.provider.cache), what)(self.name, host))
        end_connections(self._layout, host)

    def states(self) -> dict[str, set[str]]:
        """The state flags of every node, by name, as `shoal status` reads them."""
        if "controller" not in self.instances():
            return {node["name"]: set(node["state"]) for node in self.json("status")["nodes"]}
        return {node.name: set(node.state) for node in parse_nodes(self.on("controller", *NODES_COMMAND))}

    def starts_soon(self, job: str) -> bool:
        """Whether a job that is queued again starts within seconds. It is asked to: Slurm lets it wait for two minutes.

        But not at once: slurmd takes no job in the second in which it has killed it, and the job fails.
        """
        words = self.on("controller", "scontrol", "-o", "show", "job", job, status=None).split()
        fields = {key: value for key, _, value in (word.partition("=") for word in words)}
        if fields.get("JobState") != "PENDING":
            return fields.get("JobState") in ("RUNNING", "COMPLETED")
        wait = datetime.fromisoformat(fields["EligibleTime"]).replace(tzinfo=UTC) - datetime.now(UTC)
        if wait > timedelta(seconds=10):
            self.on("controller", "scontrol", "update", f"JobId={job}", "StartTime=now+3", status=None)
        return wait <= timedelta(seconds=10)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait for something that Slurm or a host does in its own time. Who cannot be asked yet is asked again."""
        seconds *= SLOWNESS
        end = time.monotonic() + seconds
        while True:
            asked, problem = time.monotonic(), ""
            try:
                if condition():
                    return
            except (AssertionError, ShoalError, subprocess.TimeoutExpired) as error:
                problem = f"; asked last, it failed: {error}"
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s{problem}"
            # What takes long to ask is asked less often: on a busy machine, questions would slow what is waited for.
            time.sleep(min(max(0.25, time.monotonic() - asked), 3))

    def answers(self, host: str) -> bool:
        """Whether it lets root log in."""
        return self.ssh(host, "true", login=True).returncode == 0


@contextmanager
def running(directory: Path, text: str, timeout: float = LIMIT) -> Iterator[Cluster]:
    """A cluster that is up for as long as the block lasts."""
    cluster = Cluster(directory, text)
    with taken_down(cluster):
        assert cluster.json("up", timeout=timeout)["whole"]
        yield cluster


@contextmanager
def taken_down(cluster: Cluster) -> Iterator[None]:
    """The block begins without any host of a sandbox cluster, and leaves none."""
    with noted(cluster.name, cluster.provider.cache):
        cluster.down()
        try:
            yield
        finally:
            cluster.down()


HOLD_APT = """\
rm -f /run/release /run/held
systemd-run --quiet --collect --unit=holder python3 -c '
import fcntl, os, time
file = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
open("/run/held", "w").close()
while not os.path.exists("/run/release"):
    time.sleep(0.1)
'
while [ ! -e /run/held ]; do sleep 0.1; done
"""
"""On a host: apt is busy from now on, and whoever wants to install something waits there."""

RELEASE_APT = "touch /run/release; while systemctl -q is-active holder; do sleep 0.1; done"


def read_until(process: subprocess.Popen[str], phase: str) -> None:
    """Wait until a command has said that a phase is over; no phase is no wait."""
    assert process.stdout is not None
    said = ""
    with limited(process):
        while phase:
            line = process.stdout.readline()
            said += line
            assert line, f"it ended before {phase!r}: {said}"
            if phase in line:
                return


@contextmanager
def limited(process: subprocess.Popen[str], seconds: float = LIMIT) -> Iterator[None]:
    """A command that takes too long to say what is waited for is killed: then its output ends."""
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a command and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def stop_connections() -> None:
    """Have Shoal log in anew to all hosts. Commands that use a connection keep it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    for path in Path(runtime, f"shoal-connections-{os.geteuid()}").iterdir():
        if path.is_socket():
            subprocess.run(["ssh", "-O", "stop", "-S", str(path), "host"], check=False, capture_output=True)
