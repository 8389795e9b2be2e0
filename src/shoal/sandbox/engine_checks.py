"""Checks whether podman or docker can run sandbox hosts here, and what to install."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess  # nosec B404
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.hosts.provider import Request
from shoal.sandbox import images
from shoal.sandbox.engine import SYSTEM_PROGRAMS, has_cgroup, is_rootless, needs_runc
from shoal.sandbox.layout import NAME, NAME_RULE, OPEN_SITE
from shoal.spec.finding import Finding

PACKAGES = {
    "podman": "podman",
    "docker": "docker.io",
    "runc": "runc",
    "newuidmap": "uidmap",
    "slirp4netns": "slirp4netns",
    "netavark": "netavark",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
}
"""Program -> its Debian package."""
DAEMON_TIMEOUT_S = 20.0
DESKTOP = "install Docker Desktop or podman"


@dataclass(frozen=True)
class EngineFacts:
    """Properties of this machine and user that an engine needs."""

    programs: frozenset[str]
    linux: bool = True
    rootless: bool = False
    user: str = "root"
    subordinate_ids: bool = True
    cgroup: bool = True
    """Whether this user may make cgroups."""
    hybrid: bool = False
    """Whether the machine has cgroup v1, with which podman needs runc."""
    daemon: str = ""
    """Why the daemon of docker does not answer; empty if it does."""

    @classmethod
    def observe(cls, engine: str) -> EngineFacts:
        linux = sys.platform == "linux"
        podman = linux and engine == "podman"
        return cls(
            programs=frozenset(name for name in PACKAGES if _find(name)),
            linux=linux,
            rootless=is_rootless(),
            user=getpass.getuser(),
            subordinate_ids=not podman or _has_subordinate_ids(getpass.getuser()),
            cgroup=not podman or not is_rootless() or has_cgroup(),
            hybrid=podman and needs_runc(),
            daemon=_ask_daemon() if engine == "docker" else "",
        )


def find_problems(engine: str, requests: Sequence[Request], facts: EngineFacts) -> list[Finding]:
    """Every error and warning about these hosts under this engine."""
    return [
        *_engine_problems(engine, facts),
        *(finding for request in requests for finding in _host_problems(request, engine)),
    ]


def _engine_problems(engine: str, facts: EngineFacts) -> list[Finding]:
    needed = [engine]
    if engine == "podman" and facts.linux:
        needed += ["netavark", "iptables", *(["runc"] if facts.hybrid else [])]
        needed += ["newuidmap", "slirp4netns"] if facts.rootless else []
    missing = [name for name in needed if name not in facts.programs]
    packages = dict.fromkeys(PACKAGES[name] for name in missing)
    install = f"run `apt-get install --no-install-recommends {' '.join(packages)}`" if facts.linux else DESKTOP
    ids = f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user}"
    group = f"/sys/fs/cgroup/systemd/{facts.user}"
    give = (
        f"as root, run `mkdir -p {group} && chown -R {facts.user} {group}`, once after each boot of this machine"
        if facts.hybrid
        else "log in by SSH or at the console, so that systemd runs a manager for you (not with `su`)"
    )
    start = "start it (`systemctl start docker`, or Docker Desktop), and see that you may use it: group `docker`"
    no_group = "rootless podman has no cgroup in which systemd could run"
    rows = (
        (bool(missing), f"hosts of kind {engine} need these programs: {', '.join(missing)}", "", install),
        (engine in facts.programs and bool(facts.daemon), "the docker daemon does not answer", facts.daemon, start),
        (
            facts.rootless and not facts.subordinate_ids and engine == "podman",
            "rootless podman needs subordinate user ids",
            f"no line for {facts.user} in /etc/subuid",
            f"as root, run `{ids}`",
        ),
        (facts.rootless and not facts.cgroup and engine == "podman", no_group, "", give),
    )
    return [Finding("error", what, found, fix) for wrong, what, found, fix in rows if wrong]


def _host_problems(request: Request, engine: str) -> list[Finding]:
    shape = request.shape
    other = "leave it out, or use `kind: container` or `kind: vm`"
    images_fix = f"use one of: {', '.join(images.SUITES)}"
    rows = (
        (not NAME.fullmatch(request.name), "not a host name", repr(request.name), NAME_RULE),
        (shape.engine != engine, f"not of kind {engine} as other hosts", "", "use one kind for all hosts"),
        (shape.image not in images.SUITES, "unknown image", repr(shape.image), images_fix),
        (shape.site != OPEN_SITE, f"{engine} has one site", f"site {shape.site}", other),
        (shape.disk_mb is not None, f"{engine} cannot limit a disk", f"{shape.disk_mb}M", other),
        (shape.cgroups, f"{engine} has no cgroups for Slurm", "cgroups: true", other),
        (not 0 <= shape.gpus <= 64, "`gpus` out of range", str(shape.gpus), "ask for 0 to 64"),
    )
    return [Finding("error", what, found, fix, host=request.name) for wrong, what, found, fix in rows if wrong]


def _find(program: str) -> str | None:
    """The PATH of an ordinary user often lacks the sbin directories, and podman's helpers have one of their own."""
    more = (*SYSTEM_PROGRAMS, "/usr/lib/podman", "/usr/libexec/podman")
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *more]))


def _has_subordinate_ids(user: str) -> bool:
    try:
        return all(f"{user}:" in f"\n{Path(name).read_text()}" for name in ("/etc/subuid", "/etc/subgid"))
    except OSError:
        return False


def _ask_daemon() -> str:
    """Why the daemon of docker does not answer; empty if it does."""
    try:
        done = subprocess.run(  # nosec B603 B607
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=DAEMON_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()
