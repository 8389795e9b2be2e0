"""A container engine, podman or docker: how it is called, and the command that makes a host of it.

Both take the same commands. Where they differ, they differ here.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.sandbox.cgroups import hierarchies, is_v2_only
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.programs import call

LOOPBACK = "127.0.0.1"
LABEL = "shoal.cluster"
CGROUPS = Path("/sys/fs/cgroup")
CAPABILITIES = ("AUDIT_WRITE", "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_PTRACE")
"""What systemd, sshd, Slurm and nftables need beyond what engines give by default."""
SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""The PATH of an ordinary user often lacks them, and podman's helpers need iptables."""
ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
STORAGE_FILES = ("/etc/containers/storage.conf", "~/.config/containers/storage.conf")


@dataclass(frozen=True)
class Engine:
    """An engine of this machine, for the user that runs Shoal."""

    name: str
    prefix: tuple[str, ...]
    """The command line up to the engine's own commands."""

    async def run(self, *arguments: str | Path, stdin: bytes = b"", check: bool = True, apart: bool = False) -> str:
        """Run a command of the engine, and return what it printed. Raises ProviderError when it fails."""
        shown = f"{self.name} {arguments[0]}"
        return await call(*self.prefix, *arguments, stdin=stdin, check=check, shown=shown, apart=apart)


def find_engine(name: str) -> Engine:
    """The engine of that name, with the options that it needs on this machine."""
    if name != "podman" or sys.platform != "linux":
        return Engine(name, (name,))
    options = []
    if not Path("/run/systemd/system").is_dir():
        options.append("--cgroup-manager=cgroupfs")
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_PROGRAMS])
    if needs_runc() and shutil.which("runc", path=path):
        options += ["--runtime", "runc"]
    storage_files = [Path(file).expanduser() for file in STORAGE_FILES]
    if is_rootless() and "STORAGE_DRIVER" not in os.environ and not any(file.exists() for file in storage_files):
        # Debian's default copies the whole image for every host.
        options += ["--storage-driver", "overlay"]
    group = delegated_cgroup() if is_rootless() else None
    enter = ("sh", "-c", ENTER, str(group)) if group is not None else ()
    return Engine(name, (*enter, "env", f"PATH={path}", name, *options))


def default_kind() -> Literal["container", "podman", "docker"]:
    """What sandbox hosts are where no file says it: root needs no engine, and others need one."""
    if os.geteuid() == 0:
        return "container"
    return "podman" if shutil.which("podman") else "docker" if shutil.which("docker") else "container"


def is_rootless() -> bool:
    return os.geteuid() != 0


def needs_runc() -> bool:
    """Whether podman needs runc here: crun refuses machines that have both versions of cgroups."""
    return CGROUPS.is_dir() and not is_v2_only(hierarchies())


def delegated_cgroup(cgroups: Path = CGROUPS, user: str | None = None, own: str | None = None) -> Path | None:
    """The group that root gave to this user on a machine with cgroup v1, if ours is not writable already."""
    if _is_writable(_own_group(cgroups, own)):
        return None
    given = cgroups / "systemd" / (user or pwd.getpwuid(os.geteuid()).pw_name)
    return given if _is_writable(given) else None


def has_cgroup() -> bool:
    """Whether this user may make cgroups, which systemd in a host needs."""
    if is_v2_only(hierarchies()) and Path("/run/systemd/system").is_dir():
        # The manager of the user's login makes them.
        return Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "systemd").is_dir()
    return _is_writable(_own_group(CGROUPS, None)) or delegated_cgroup() is not None


def _own_group(cgroups: Path, text: str | None) -> Path:
    """The group of this process: that of systemd's hierarchy in cgroup v1, else the one of v2."""
    rows = [line.split(":", 2) for line in (text or Path("/proc/self/cgroup").read_text()).splitlines()]
    for _, hierarchy, group in rows:
        if hierarchy == "name=systemd":
            return cgroups / "systemd" / group.lstrip("/")
    return cgroups / next((group.lstrip("/") for _, hierarchy, group in rows if not hierarchy), "")


def _is_writable(group: Path) -> bool:
    return os.access(group / "cgroup.procs", os.W_OK)


def create_arguments(layout: Layout, host: HostRecord, network: str, engine: str) -> list[str]:
    """The engine's command that makes the host, and does not start it."""
    shape = host.shape
    gpus = [f"nvidia{index}" for index in range(shape.gpus)] + (["nvidiactl"] if shape.gpus else [])
    return [
        "create", "--tty", "--name", layout.namespace(host.name), "--hostname", host.name,
        "--label", f"{LABEL}={layout.id}",
        "--network", network, "--ip", host.address, "--publish", f"{LOOPBACK}:{host.port}:22",
        "--volume", f"{layout.shared}:/shared",
        # A host that reboots ends with an error, and is started again. One that is killed from outside stays down.
        "--restart", "on-failure",
        *(f"--cap-add={name}" for name in CAPABILITIES),
        "--security-opt", "apparmor=unconfined", "--security-opt", "label=disable",
        *(f"--device={path}" for path in ("/dev/net/tun", "/dev/fuse") if Path(path).exists()),
        *(f"--device=/dev/null:/dev/{name}" for name in gpus),
        *(["--memory", f"{shape.memory_mb}m"] if shape.memory_mb else []),
        *(_podman_options() if engine == "podman" else _docker_options()),
        host.image, "systemd",
    ]  # fmt: skip


def network_prefix(layout: Layout) -> str:
    """How the name of the cluster's network begins.

    Its end is new each time: under the name, podman keeps addresses of containers that ended while it was killed.
    """
    return f"{layout.prefix}network"


def _podman_options() -> list[str]:
    import resource  # no such module on Windows

    # By default podman raises them to values that only root may set. Rootless, it lowers its own to 32768 processes.
    limits = {"nofile": (resource.RLIMIT_NOFILE, 1 << 20), "nproc": (resource.RLIMIT_NPROC, 1 << 15)}
    options = ["--systemd=always"]
    for name, (number, most) in limits.items():
        hard = resource.getrlimit(number)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
        options += ["--ulimit", f"{name}={limit}:{limit}"]
    return options


def _docker_options() -> list[str]:
    return [
        "--cgroupns=private", "--tmpfs=/run", "--tmpfs=/run/lock", "--env=container=docker",
        "--security-opt", "seccomp=unconfined",
    ]  # fmt: skip
