"""Starts a sandbox host under systemd-nspawn.

Its root is an overlay of three layers: the image (shared, never written), `seed` (what makes this host itself: name,
keys, GPUs) and `upper` (what it writes). The overlay is mounted in a mount namespace of the host's own, so when its
processes end, however they end, no mount is left.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from shoal.sandbox.cgroups import is_v2_only
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import ENTER, cpus_of, group
from shoal.sandbox.seed import write_file, write_resolver

LAUNCH = """\
set -eu
umask 022
home=$1 lower=$2 cgroup2=$3 cpus=$4
shift 4
enter() { while read -r group; do echo 0 > "$group$1/cgroup.procs"; done < "$home/groups2"; }
writable=$home
if [ -e "$home/disk.img" ]; then
    mount -o loop "$home/disk.img" "$home/disk"
    writable=$home/disk
fi
mkdir -p "$writable/upper" "$writable/work"
rm -rf "$writable/work/work/incompat"
mount -t overlay -o "lowerdir=$lower,upperdir=$writable/upper,workdir=$writable/work,volatile" shoal "$home/root"
cd /
enter /launcher
status=133
while [ "$status" = 133 ]; do
    status=0
    if [ "$cgroup2" = yes ]; then
        fresh='umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
        (enter ""; exec unshare --mount --propagation private sh -c "$fresh" sh taskset --cpu-list "$cpus" "$@")
    else
        (enter ""; exec taskset --cpu-list "$cpus" "$@")
    fi || status=$?
done
exit "$status"
"""
"""Runs as the host's parent: mounts its root and starts it, again after each reboot (nspawn's status 133)."""

NOT_IN_CONTAINERS = (
    *("audit_control", "dac_read_search", "ipc_owner", "lease", "linux_immutable", "mknod", "net_broadcast"),
    *("sys_admin", "sys_boot", "sys_nice", "sys_ptrace", "sys_resource", "sys_tty_config"),
)
"""Capabilities that nspawn leaves to root and Docker drops by default."""

CONTAINER = f"""\
given=/etc/shoal-sandbox.d/meminfo
[ ! -e $given ] || mount --bind -o ro $given /proc/meminfo
rm -rf /dev/net
mkdir -p /run/sshd
exec setpriv --inh-caps -all --bounding-set {",".join(f"-{name}" for name in NOT_IN_CONTAINERS)} \\
    sh -c 'trap "exit 143" TERM; /usr/sbin/sshd -D -e & wait'
"""
"""A container's first process: it gives up what it may not do, starts the SSH server, and takes care of orphans.

The kernel keeps signals from a first process that has no handler for them.
"""


async def start(layout: Layout, host: HostRecord) -> None:
    """Start the host and return at once. It lives on when this process ends."""
    home = layout.host_dir(host.name)
    (home / "ready").unlink(missing_ok=True)
    write_resolver(home / "seed")
    cgroups = group(layout, host.name)
    cgroups.make(cpus_of(host), host.shape.memory_mb, controllers=host.shape.cgroups)
    # In cgroup v2 a group with groups below it holds no process: nspawn makes two below, the launcher gets a third.
    unified = [path for path in cgroups.paths if path == cgroups.roots.get("unified", Path()) / cgroups.name]
    for path in unified:
        (path / "launcher").mkdir(exist_ok=True)
    write_file(home / "groups", "".join(f"{path}\n" for path in cgroups.paths).encode(), 0o644)
    write_file(home / "groups2", "".join(f"{path}\n" for path in unified).encode(), 0o644)
    write_file(home / "launch", LAUNCH.encode(), 0o644)
    fresh = host.shape.image != "debian12" and not is_v2_only(cgroups.roots)
    arguments = [
        "sh", "-c", ENTER, "sh", str(home / "groups"),
        "setsid", "--fork", "unshare", "--mount", "--propagation", "private",
        "sh", str(home / "launch"), str(home), f"{home / 'seed'}:{host.image}", "yes" if fresh else "no",
        ",".join(str(cpu) for cpu in cpus_of(host)), *_nspawn(layout, host),
    ]  # fmt: skip
    # "network": the host may change its own network's kernel settings; "1" (all of /sys) is what cgroups take.
    writable = "1" if host.shape.cgroups else "no" if host.shape.container else "network"
    # Without its own locks: a killed nspawn would leave their files behind. We hold the cluster's lock.
    env = {**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": writable, "SYSTEMD_NSPAWN_LOCK": "0"}
    with (home / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env
        )
        await process.wait()


def _nspawn(layout: Layout, host: HostRecord) -> list[str]:
    """The command that runs the host: a whole machine, or a container as a provider of containers runs one.

    A container has no init system, may do what a container may by default, and has no device but GPUs.
    """
    home = layout.host_dir(host.name)
    command = [
        "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={home / 'root'}",
        f"--machine={layout.namespace(host.name)}", f"--hostname={host.name}",
        f"--network-namespace-path=/run/netns/{layout.namespace(host.name)}",
        "--resolv-conf=off", "--timezone=off", "--link-journal=no",
        *(f"--bind={path}:/dev/{path.name}" for path in sorted((home / "devices").iterdir())),
    ]  # fmt: skip
    if host.shape.container:
        return [*command, "--console=pipe", "/bin/sh", "-c", CONTAINER]
    # One directory that all hosts of the cluster have in common, as a lab has a file server.
    layout.shared.mkdir(mode=0o1777, exist_ok=True)
    layout.shared.chmod(0o1777)
    return [
        *command, "--boot", "--capability=all", "--console=read-only",
        # nfs-ganesha needs the first, Slurm the second to confine devices on cgroup v2, Docker the others. nspawn
        # blocks all by default: together with all capabilities they allow an escape from the container.
        "--system-call-filter=open_by_handle_at bpf add_key keyctl request_key",
        *(f"--bind={path}" for path in ("/dev/net/tun", "/dev/fuse") if Path(path).exists()),
        f"--bind={layout.shared}:/shared",
    ]  # fmt: skip
