"""Faults of virtual machines, for tests: a clock that is wrong, slow and lossy links, a disk that fails, less memory.

A power cut is `kill` of SandboxFaults, as for containers: what the machine had not flushed is lost.
"""

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path

from tests.e2e.cluster import Cluster

from shoal.hosts.provider import Request
from shoal.sandbox.layout import Layout

LOOP_MB = 48
FAILING_DISK = f"""\
set -e
modprobe -a loop dm_mod
truncate -s {LOOP_MB}M /var/tmp/failing.img
loop=$(losetup --find --show /var/tmp/failing.img)
size=$(blockdev --getsz "$loop")
echo "0 $size linear $loop 0" | dmsetup create failing
mkfs.ext4 -q -O ^has_journal /dev/mapper/failing
mkdir -p DIRECTORY
mount /dev/mapper/failing DIRECTORY
chmod 1777 DIRECTORY
"""
BREAK_DISK = """\
set -e
sync
size=$(blockdev --getsz /dev/mapper/failing)
dmsetup suspend --noflush failing
echo "0 $size error" | dmsetup load failing
dmsetup resume failing
"""


def shell(cluster: Cluster, host: str, script: str) -> str:
    """Run a shell script on a host as root; what it printed."""
    done = cluster.ssh(host, f"sh -c {shlex.quote(script)}")
    assert done.returncode == 0, f"{host}: {script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shift_clock(cluster: Cluster, host: str, seconds: int) -> None:
    """Set the host's clock wrong by so many seconds. Only a machine with a kernel of its own has a clock of its own."""
    shell(cluster, host, f"date -s @$(($(date +%s) + {seconds})) > /dev/null")


def slow_down(cluster: Cluster, host: str, site: str, *, delay_ms: int = 0, loss: float = 0, mbit: int = 0) -> None:
    """Delay, lose and limit what the host sends to a site, with netem. Hosts of other sites do not notice."""
    subnet = Layout(cluster.provider.cache, cluster.name).sites()[site].subnet
    netem = ["limit 10000"]
    netem += [f"delay {delay_ms}ms"] if delay_ms else []
    netem += [f"loss {loss}%"] if loss else []
    netem += [f"rate {mbit}mbit"] if mbit else []
    speed_up(cluster, host)
    shell(
        cluster,
        host,
        "set -e; tc qdisc add dev eth0 root handle 1: prio\n"
        f"tc qdisc add dev eth0 parent 1:3 handle 30: netem {' '.join(netem)}\n"
        f"tc filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst {subnet} flowid 1:3",
    )


def speed_up(cluster: Cluster, host: str) -> None:
    """Take netem away."""
    shell(cluster, host, "tc qdisc del dev eth0 root 2> /dev/null || true")


def mount_failing_disk(cluster: Cluster, host: str, directory: str) -> None:
    """Mount a small disk of its own at a directory: it can be filled, and `break_disk` makes it fail."""
    shell(cluster, host, "command -v dmsetup > /dev/null || apt-get install -qy --no-install-recommends dmsetup")
    shell(cluster, host, FAILING_DISK.replace("DIRECTORY", directory))


def break_disk(cluster: Cluster, host: str) -> None:
    """From now on the disk of `mount_failing_disk` answers every access with an error."""
    shell(cluster, host, BREAK_DISK)


def remove_memory(cluster: Cluster, host: str, memory_mb: int) -> None:
    """Cut the power, and start the host with this much memory, as after a module died."""
    cache: Path = cluster.provider.cache
    layout = Layout(cache, cluster.name)
    cluster.fault("kill", host)
    record = layout.hosts()[host]
    layout.save_host(replace(record, shape=replace(record.shape, memory_mb=memory_mb)))
    start(cluster, host)


def start(cluster: Cluster, host: str) -> None:
    """Start a host that was killed, as it was made, and wait for its SSH server. `up` would change it as well."""
    record = Layout(cluster.provider.cache, cluster.name).hosts()[host]
    request = Request(record.name, record.shape)
    asyncio.run(cluster.provider.create(cluster.name, [request], lambda text, part: None))
